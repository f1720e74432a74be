"""The folder of an adapter of PEFT, as ``PeftModel.from_pretrained`` loads it."""
