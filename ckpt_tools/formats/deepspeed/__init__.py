"""DeepSpeed's formats: ZeRO-1, -2, -3 and universal."""
