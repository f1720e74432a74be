"""Is a checkpoint healthy: are its values those of a training that works, and is it whole?"""
