"""Is it the same, whole, signed, safe? Comparison, digests, signatures and the scan."""
