"""What ZeRO's and universal's readers and writers share."""
