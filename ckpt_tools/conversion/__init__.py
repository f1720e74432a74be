"""Conversions: values, each made from the one before, and then the bytes.

    request ─open─▶ OpenedCheckpoint ─edit─▶ EditedCheckpoint ─lay out─▶ LaidOutCheckpoint ─▶ Plan ─write─▶ output
                    headers alone    ▲       after all options          files, byte by byte  tasks
                    ConversionTarget ┘
                    destination and format

Nothing is written before the plan, and every refusal happens by then: writing meets failures of disk and network, and
damaged bytes.
"""
