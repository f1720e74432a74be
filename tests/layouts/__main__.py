"""``python -m tests.layouts`` writes docs/layouts.md anew."""

from __future__ import annotations

from tests.layouts.gallery import PAGE, page

if __name__ == "__main__":
    PAGE.write_text(page())
