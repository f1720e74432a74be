"""``python -m tests.pictures`` draws docs/concepts/pictures again."""

from __future__ import annotations

from tests.pictures.drawing import FOLDER, pictures

if __name__ == "__main__":
    for name, text in pictures().items():
        (FOLDER / name).write_text(text)
