"""Parts that readers and writers of ZeRO and universal share."""
