"""The attachment `mirror:ADDRESS` of runs and tournaments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from podracer.errors import ConfigError
from podracer.io.addresses import address_of
from podracer.io.directories import holds_begun_tournament
from podracer.io.seal import CONFIG, is_there
from podracer.run.result import RunInfo
from podracer.tournament.orchestrator import TournamentInfo
from podracer_cloud import store as stores
from podracer_cloud.contents import Contents
from podracer_cloud.lease import CLOCK
from podracer_cloud.mirror import OTHER, Mirror, recorded_address
from podracer_cloud.runs import RunCopy
from podracer_cloud.tournaments import TournamentCopy


def mirror(address: str = "") -> Callable[[RunInfo | TournamentInfo], Mirror]:
    """Copy what a run or a tournament saves to an address, by default the one of its directory."""

    def attach(info: RunInfo | TournamentInfo) -> Mirror:
        if isinstance(info, RunInfo):
            directory, kind = info.run_dir, RunCopy
            is_new = not is_there(directory / CONFIG)
        else:
            directory, kind = info.directory, partial(TournamentCopy, board=info)
            is_new = not holds_begun_tournament(directory)
        place = address_of(address) if address else recorded_address(directory)
        if place is None:
            raise ConfigError(
                f"a mirror needs an address: `mirror:s3://bucket/run`, not {address!r}."
            )
        if is_new:
            check_is_free(place)
        return Mirror(directory, place, kind, new=is_new)

    return attach


def check_is_free(address: str) -> None:
    """Raise `ConfigError` if a store cannot be written, or has a copy of something already."""
    store = stores.open_store(address, writes=True)
    try:
        store.put(CLOCK, b"now")
        contents = Contents(store)
        contents.refresh()
    except Exception as error:
        raise ConfigError(f"{address} cannot be written: {stores.reason(error)}.") from error
    if contents.kind:
        raise ConfigError(OTHER.format(address=address, kind=contents.kind))
