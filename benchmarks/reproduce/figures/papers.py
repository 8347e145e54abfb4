"""The papers whose figures are here."""

from benchmarks.reproduce.figure import Paper

PODRACER = Paper(
    "Podracer", "Podracer architectures for scalable RL (Hessel et al. 2021, arXiv 2104.06272)"
)
ELEGANTRL = Paper("ElegantRL-Podracer", "ElegantRL-Podracer (Liu et al. 2021)")
FINRL = Paper("FinRL-Podracer", "FinRL-Podracer (Li et al. 2021)")
GALA = Paper("GALA", "Gossip-based actor-learner architectures (Assran et al. 2019)")
DISCORL = Paper("DiscoRL", "Discovering state-of-the-art RL algorithms (Oh et al. 2025)")
