"""The figures: a file for each that is measured, the others in `published.toml`."""

from benchmarks.reproduce.figure import Figure
from benchmarks.reproduce.figures import (
    anakin_scaling,
    atari_200m,
    disco_catch,
    finrl_evolution,
    gala,
    impala,
    larger_networks,
    lpg_price,
    lpg_rate,
    lpg_rule,
    notebook,
    sebulba_batch,
    sebulba_settings,
)
from benchmarks.reproduce.published import PAPERS, published_figures

_MEASURED = (
    notebook, anakin_scaling, sebulba_batch, sebulba_settings, lpg_rate, lpg_price, lpg_rule,
    impala, atari_200m, larger_networks, finrl_evolution, gala, disco_catch,
)  # fmt: skip
_ALL = [*(module.FIGURE for module in _MEASURED), *published_figures()]

FIGURES: dict[str, Figure] = {
    figure.name: figure for paper in PAPERS.values() for figure in _ALL if figure.paper == paper
}
"""Figures by name, in the order of the page: by paper, those that are measured first."""
