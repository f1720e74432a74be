"""Encodings that several formats share: pickles read without being run, zip archives, torch's files, strict JSON."""
