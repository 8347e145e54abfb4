"""What the check of an environment found, as text and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax

from podracer.types import EnvironmentSpec


@dataclasses.dataclass(frozen=True)
class Finding:
    """One sentence on an environment: an error makes it unusable, a warning does not."""

    level: Literal["error", "warning"]
    text: str


@dataclasses.dataclass(frozen=True, repr=False)
class EnvironmentReport:
    """What was found on an environment, by its specification and in random play."""

    name: str
    spec: EnvironmentSpec | None
    """Specification, None where it cannot be read."""
    findings: tuple[Finding, ...] = ()
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What random play measured: steps, ends of episodes, returns, and steps a second."""

    @property
    def usable(self) -> bool:
        """Whether an agent can be trained in the environment: nothing found is an error."""
        return all(finding.level != "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the report as an object of JSON."""
        return {
            "environment": self.name,
            "usable": self.usable,
            "spec": None if self.spec is None else _describe(self.spec),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "figures": self.figures,
        }

    def __repr__(self) -> str:
        lines = [f"{self.name}: {'usable' if self.usable else 'not usable'}"]
        if self.spec is not None:
            lines += [f"  {name}: {text}" for name, text in _describe(self.spec).items()]
        lines += [f"  {name}: {_number(value)}" for name, value in self.figures.items()]
        lines += [f"  {finding.level}: {finding.text}" for finding in self.findings]
        return "\n".join(lines if self.findings else [*lines, "  no errors and no warnings"])


def _describe(spec: EnvironmentSpec) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(spec.observation)
    observation = ", ".join(
        f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}".strip()
        + (" divided by 255" if leaf.scaled else "")
        for path, leaf in leaves
    )
    return {"observation": observation, "action": str(spec.action)}


def _number(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"
