"""Names that a user may have mistyped."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The rest of a message that refuses `name`: what could have been meant."""
    known = list(known)
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(by_lower[match] for match in close)}?"
    return f"choose one of {', '.join(known)}."
