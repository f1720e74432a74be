"""``python -m tests.layouts`` writes docs/layouts.md and the layouts in docs/formats/ again."""

from tests.layouts.gallery import DOCS, pages

if __name__ == "__main__":
    for path, text in pages().items():
        (DOCS / path).write_text(text)
