"""The figures, a file for each, in the order of the page."""

from benchmarks.reproduce.figure import Figure
from benchmarks.reproduce.figures import (
    anakin_scaling,
    atari_200m,
    disco_catch,
    elegantrl_ant,
    elegantrl_humanoid,
    elegantrl_isaac_ant,
    elegantrl_isaac_humanoid,
    elegantrl_trading,
    elegantrl_trading_time,
    finrl_evolution,
    finrl_scaling,
    gala,
    impala,
    larger_networks,
    lpg_price,
    lpg_rate,
    lpg_rule,
    muzero_scaling,
    notebook,
    pod_throughput,
    pong_minute,
    sebulba_batch,
    sebulba_settings,
)

FIGURES: dict[str, Figure] = {
    module.FIGURE.name: module.FIGURE
    for module in (
        notebook,
        anakin_scaling,
        sebulba_batch,
        sebulba_settings,
        muzero_scaling,
        lpg_rate,
        lpg_price,
        lpg_rule,
        impala,
        atari_200m,
        larger_networks,
        pod_throughput,
        pong_minute,
        elegantrl_trading,
        elegantrl_trading_time,
        elegantrl_ant,
        elegantrl_humanoid,
        elegantrl_isaac_ant,
        elegantrl_isaac_humanoid,
        finrl_scaling,
        finrl_evolution,
        gala,
        disco_catch,
    )
}
"""Figures by name, in the order of the page."""
