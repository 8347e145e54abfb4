"""The Python of the pages of the documentation, read and run as a reader would."""

import builtins
import re
import symtable
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+) -->\n)?```python\n(?P<code>.*?)^```$", re.M | re.S
)


class Block(NamedTuple):
    line: int
    code: str
    why_not: str | None

    @property
    def imports(self) -> bool:
        """Whether it looks as if it could be copied alone."""
        says_otherwise = self.code.startswith("# continues the block")
        return not says_otherwise and bool(re.search("^(from|import) ", self.code, re.M))

    def foreign_names(self) -> set[str]:
        """The names that it uses and that neither it nor Python defines."""
        module = symtable.symtable(self.code, "block", "exec")
        own = {x.get_name() for x in module.get_symbols() if x.is_assigned() or x.is_imported()}
        used, tables = set[str](), [module]
        while tables:
            table = tables.pop()
            tables += table.get_children()
            used |= {
                x.get_name() for x in table.get_symbols() if x.is_referenced() and x.is_global()
            }
        return used - own - vars(builtins).keys()


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(text[: match.start("code")].count("\n"), match["code"], match["why"])
        for match in BLOCK.finditer(text)
    ]


def run_page(page: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the blocks of a page from top to bottom and return the module that they make."""
    module = types.ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page):
        if block.why_not is None:
            # Lines keep their numbers in the page, for tracebacks.
            with jax.numpy_rank_promotion("allow"):  # as users have it
                exec(compile("\n" * block.line + block.code, page, "exec"), vars(module))
    return module
