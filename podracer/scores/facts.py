"""Facts about a run in words: what pages, the live panel and the lines of the terminal show.

Under Sebulba they tell how actors and learner spend their time, and which one waits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from podracer.scores.format import clock, compact, number, percent
from podracer.scores.runs import RunRecords
from podracer.scores.score import best_return

_ENDS = {
    "target_return": "an evaluation reached the target return",
    "max_seconds": "its time was over",
}
ACTOR_STAGES = (
    "actor_time_environment", "actor_time_inference", "actor_time_transfer", "actor_time_device",
    "actor_time_parameters", "actor_time_queue",
)  # fmt: skip
LEARNER_STAGES = ("learner_time_learn", "learner_time_report", "learner_time_collect")
# The working stages of an actor as a bottleneck: name, and advice.
_ADVICE = {
    "actor_time_environment": ("Environments are", "more environment threads or cores"),
    "actor_time_inference": ("Inference is", "more actor devices or a smaller network"),
    "actor_time_transfer": ("Transfer is", "smaller observations, such as bytes, not floats"),
    "actor_time_device": ("The shared device is", "`--update-pieces` or a device for each"),
}
_MATTERS = 0.1  # share of waiting that is mentioned
_CLEAR = 2.0  # one side waits this many times as long as the other: it waits for it
_STANDS_OUT = 1.25  # a stage of actors that takes this many times as long as the next


class Shares(NamedTuple):
    """Fractions of time, from 0 to 1, that actors and learner spent in each stage."""

    actors_wait: float
    learner_waits: float
    learner_reports: float
    acting: dict[str, float]  # the working stages of actors by key, largest first, or nothing


def facts(run: RunRecords) -> dict[str, str]:
    """Return what is known of a run by name, in the order in which it is shown."""

    def values(key: str) -> np.ndarray:
        return run.series(key, "updates")[1]

    last, settings, device = run.last, run.settings, run.config.get("device", "")
    if isinstance(device, dict):
        device = f"{device.get('devices', 1)} x {device.get('kind', device.get('platform', '?'))}"
    versions, distinct = run.config.get("versions"), last("evaluation_distinct_episodes")
    distinct = distinct if last("pods_failed") is None else None  # a mean over pods is no count
    of_all = f" of {settings['evaluation_episodes']}" if "evaluation_episodes" in settings else ""
    pace, compiled = values("frames_per_second"), values("time_compile")
    lag, largest_lag, queue = map(values, ("lag_mean", "lag_max", "queue_occupancy"))
    shares, evaluated, end = time_shares(run), run.is_evaluated, run.early_end
    texts = {
        "Last evaluation": evaluated and number(run.final[0]),
        "Best evaluation": evaluated and number(best_return(run.records)),
        "Episode return": number(run.final_return),
        "Frames": compact(last("frames")),
        "Updates": f"{last('updates') or 0:,}",
        "Frames/second": compact(float(np.median(pace)) if len(pace) else None),
        "Wall time": clock(last("seconds")),
        "Episode length": number(last("episode_length")),
        "Ended early": end and f"{_ENDS[end]}, {settings.get(end, '')}",
        "Compile time": len(compiled) and clock(float(compiled.sum())),
        "Evaluation policy": evaluated and run.acting,
        "Distinct episodes": distinct is not None and f"{distinct:,.0f}{of_all}",
        "Policy lag": len(lag) and f"{lag.mean():.2g} mean, {largest_lag.max(initial=0):.0f} max",
        "Queue": len(queue) and percent(queue[-1]),
        "Actors wait": shares and percent(shares.actors_wait),
        "Learner waits": shares and percent(shares.learner_waits),
        "Environment faults": _faults(run),
        "Emulator frames": last("emulator_frames") and compact(last("emulator_frames")),
        "Recipe": run.config.get("recipe", ""),
        "Seed": settings.get("seed", ""),
        "Device": device,
        "Versions": isinstance(versions, dict)
        and ", ".join(f"{x} {versions[x]}" for x in ("podracer", "jax", "python") if x in versions),
    }
    return {name: str(text) for name, text in texts.items() if text}


def _faults(run: RunRecords) -> str:
    """Describe the faults of environments that a run has recovered from: `3 (died 2, hung 1)`."""
    prefix, totals = "environment_faults", dict[str, float]()
    for key in dict.fromkeys(k for record in run.records for k in record if k.startswith(prefix)):
        counts = run.series(key, "updates")[1]  # older runs restart them at a resume
        totals[key] = counts[:-1][np.diff(counts) < 0].sum() + counts[-1:].sum()
    if not (total := totals.pop(prefix, 0.0)):
        return ""
    kinds = ", ".join(f"{k.removeprefix(f'{prefix}_')} {n:,.0f}" for k, n in totals.items() if n)
    return f"{total:,.0f} ({kinds})" if kinds else f"{total:,.0f}"


def time_shares(run: RunRecords) -> Shares | None:
    """Return the shares over the whole run, or None if they were not recorded.

    Records that include compilation are left out if there are others: each is the first after a
    start or a resume, when actors also create their environments and fill the queue.
    """
    keys = [*ACTOR_STAGES, *LEARNER_STAGES]
    rows = [[record.get(key) for key in (*keys, "time_compile")] for record in run.records]
    table = np.nan_to_num(np.array(rows, float).reshape(-1, len(keys) + 1), posinf=0, neginf=0)
    warm = table[table[:, -1] == 0]
    total = dict(zip(keys, (warm if warm[:, :-1].any() else table).sum(axis=0), strict=False))
    acting = {key: total[key] for key in _ADVICE}
    waits = total["actor_time_parameters"] + total["actor_time_queue"]
    actor, learner = sum(acting.values()) + waits, sum(total[key] for key in LEARNER_STAGES)
    if actor and learner:
        ordered = sorted(acting.items(), key=lambda item: -item[1])
        collects, reports = total["learner_time_collect"], total["learner_time_report"]
        shares = {key: float(seconds / actor) for key, seconds in ordered}
        return Shares(float(waits / actor), float(collects / learner), reports / learner, shares)
    idle = [run.series(key, "updates")[1] for key in ("actor_idle", "learner_idle")]
    if not all(map(len, idle)):
        return None
    return Shares(float(idle[0].mean()), float(idle[1].mean()), 0.0, {})


def verdict(run: RunRecords) -> str:
    """Return which side is the bottleneck of a run, and what would help; empty if unknown."""
    shares = time_shares(run)
    if shares is None:
        return ""
    bottleneck, advice = _bottleneck(shares, has_lag=run.settings.get("driver.policy_lag") != "0")
    parts = [
        f"actors spend {percent(shares.actors_wait)} of their time waiting for the learner",
        f"it waits {percent(shares.learner_waits)} of its own",
    ]
    if shares.learner_reports >= 2 * _MATTERS:
        parts.append(f"and evaluates, saves and logs {percent(shares.learner_reports)}")
    stages = [f"{key.split('_')[-1]} {percent(x)}" for key, x in shares.acting.items() if x]
    is_of_actors = shares.learner_waits >= max(_MATTERS, _CLEAR * shares.actors_wait)
    details = f" Actors: {', '.join(stages)}." if stages and is_of_actors else ""
    return f"{bottleneck}: {', '.join(parts)}.{details} {advice}"


def _bottleneck(shares: Shares, *, has_lag: bool) -> tuple[str, str]:
    """Return the bottleneck and advice, each the beginning or the end of a sentence."""
    actors_wait, learner_waits, reports, acting = shares
    if max(actors_wait, learner_waits) < _MATTERS:
        return "Neither is the bottleneck", "More speed takes more of both."
    if actors_wait >= _CLEAR * learner_waits and reports > 1 - learner_waits - reports:
        return "Evaluating and saving is the bottleneck", "Try fewer evaluations."
    if actors_wait >= _CLEAR * learner_waits:
        return "The learner is the bottleneck", "Try more learner devices or a smaller batch."
    if learner_waits >= _CLEAR * actors_wait:
        name, advice = "Actors are", "more actor devices or threads"
        first, second = [*acting][:2] or ["", ""]
        if acting and acting[first] >= _STANDS_OUT * acting[second]:
            name, advice = _ADVICE[first]
        return f"{name} the bottleneck", f"Try {advice}."
    if not has_lag:
        return "They take turns, as the lag is 0", "A lag of 1 lets them work side by side."
    advice = "a larger queue or lag, which evens out bursts"
    advice = "fewer evaluations first" if reports >= 2 * _MATTERS else advice
    return "No bottleneck stands out", f"Try {advice}."
