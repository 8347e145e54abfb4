"""Variants of a parametrized test: a few by default, and the rest with `-m slow`."""

import pytest


def variants(names, default, slow, **options):
    """Parametrize a test by `default` and, marked as slow, by the others of `slow`."""

    def parameters(case):
        return (case,) if isinstance(names, str) else case

    others = [case for case in slow if case not in default]
    marked = [pytest.param(*parameters(case), marks=pytest.mark.slow) for case in others]
    return pytest.mark.parametrize(names, [*default, *marked], **options)
