"""Suggestions for mistyped names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return the end of an error message about an unknown `name`: the nearest known names."""
    candidates = list(candidates)
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    if name.lower() in by_lower:
        return f"did you mean {by_lower[name.lower()]}?"
    close = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(by_lower[match] for match in close)}?"
    return f"choose one of {', '.join(candidates)}."
