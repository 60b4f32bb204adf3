"""Models of the Hugging Face hub: fetched into its cache, and found there again. No other file knows `huggingface_hub`.

A revision is resolved to a commit once, before any actor is started; actors are told the commit's snapshot directory,
so that they load the same files whenever they start and whatever becomes of the repository meanwhile. Cache, token,
endpoint and offline mode are those of `huggingface_hub` and its environment variables. Used by `cli/plan/model.py`,
which imports it only for a model of the hub: the import takes a third of a second.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import huggingface_hub
from huggingface_hub import HfApi, constants, scan_cache_dir, try_to_load_from_cache
from huggingface_hub.errors import (
    CacheNotFound,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import logging as hub_logging

from cli.errors import BadModel, CliError
from cli.hub.download_bar import DownloadBar
from cli.hub.name import HubName
from cli.supervisor.told.progress import Progress
from nodes.model_spec import ModelError, ModelNotFound, ModelSpec
from nodes.model_spec.checkpoint_files import (
    CONFIG_FILE,
    INDEX_FILE,
    MODULES_FILE,
    SINGLE_FILE,
    require_files,
    small_files,
)
from nodes.model_spec.directory import read_description, read_directory, read_texts
from nodes.model_spec.token_files import ADDED, SPECIAL_MAP
from nodes.model_spec.weight_index import files_of_index
from nodes.sizes import size_text

_LISTING_TIMEOUT_S: Final = 30.0
"""Three times the library's own: sizes of a repository with thousands of files take the hub a while."""
_SHOWN_ERROR_CHARS: Final = 300
"""Four lines of a terminal; its HTTP library quotes whole pages."""


class Snapshot(NamedTuple):
    """One commit of a repository on this machine."""

    path: Path
    commit: str


def fetch(wanted: HubName, progress: Progress, check: Callable[[ModelSpec], object]) -> Snapshot:
    """Complete the wanted revision in the cache: fetch the files that kvmesh reads, if they are not there yet.

    Raises BadModel if the model does not exist, is not allowed, is neither reachable nor cached, or cannot be served.
    That it cannot be served is found out before its weights are fetched, by `check` too, which may raise BadModel.
    """
    if "HF_HUB_VERBOSITY" not in os.environ:
        # Errors are reported here; the library's own warnings speak of Python functions.
        hub_logging.set_verbosity_error()
    if not constants.is_offline_mode():
        progress.note(f"asking {constants.ENDPOINT} for {wanted}")
    try:
        commit, sizes = _list_files(wanted)
    except Exception as error:  # noqa: BLE001 # errors of its HTTP library come through, and that differs by version
        return _without_hub(wanted, error, progress)
    try:
        require_files(f"{wanted} of {constants.ENDPOINT}", sizes)
        return _fetch_files(wanted, commit, sizes, progress, check)
    except CliError:
        raise
    except ModelError as error:
        do = "give another model, or another revision of it"
        raise BadModel(f"the model {wanted} cannot be served", why=error.message, do=do) from error
    except Exception as error:
        # Errors of its HTTP library come through, and those of the disk; which ones differs by version.
        raise _explained(wanted, error) from error


def find_cached(wanted: HubName) -> Snapshot | None:
    """The revision as it was last seen, from the cache, if all that a mesh needs of it is there. Sends no request."""
    found = try_to_load_from_cache(wanted.repository, CONFIG_FILE, revision=wanted.revision or None)
    if not isinstance(found, str):
        return None
    path = Path(found).parent
    try:
        read_directory(path)
    except ModelNotFound:
        return None
    except ModelError:
        # Complete, but it cannot be served: loading it will say why.
        pass
    return Snapshot(path, path.name)


def cached_models() -> list[tuple[str, Path]]:
    """Name and newest snapshot of each repository in the cache that has safetensors, by name."""
    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, OSError, ValueError):
        # Nothing has been fetched yet, or the cache cannot be read.
        return []
    found: list[tuple[str, Path]] = []
    for repository in repositories:
        if repository.repo_type != "model":
            continue
        newest = max(repository.revisions, key=lambda revision: revision.last_modified, default=None)
        if newest is not None and any(file.file_name.endswith(".safetensors") for file in newest.files):
            found.append((repository.repo_id, Path(newest.snapshot_path)))
    return sorted(found)


def _list_files(wanted: HubName) -> tuple[str, dict[str, int]]:
    """The commit of the revision, and its files' sizes by name. Also remembers to which commit a branch pointed."""
    api = HfApi(library_name="kvmesh")
    commit = api.resolve_revision(wanted.repository, revision=wanted.revision or None).resolved
    info = api.model_info(wanted.repository, revision=commit, files_metadata=True, timeout=_LISTING_TIMEOUT_S)
    return commit, {file.rfilename: file.size or 0 for file in info.siblings or []}


def _fetch_files(
    wanted: HubName, commit: str, sizes: dict[str, int], progress: Progress, check: Callable[[ModelSpec], object]
) -> Snapshot:
    paths = _download(wanted, commit, {name: sizes[name] for name in small_files(sizes)}, progress)
    for name in _unknown(wanted, commit):
        # The library notes in its cache that there is no such file, which tells a later start without the hub.
        with contextlib.suppress(EntryNotFoundError):
            huggingface_hub.hf_hub_download(wanted.repository, name, revision=commit)
    directory = paths[CONFIG_FILE].parent
    spec = read_description(directory, wanted.repository)
    check(spec)
    weights = [SINGLE_FILE] if SINGLE_FILE in sizes else files_of_index(directory / INDEX_FILE)
    beside = [dense.path for dense in spec.pooling.dense if dense.path] if spec.pooling else []
    weights += [Path(path).relative_to(directory).as_posix() for path in beside]
    if absent := [name for name in weights if name not in sizes]:
        raise ModelNotFound(
            f"{wanted} has no {absent[0]}, though its {MODULES_FILE if '/' in absent[0] else INDEX_FILE} names it. Ask"
            " those who uploaded it, or give another revision."
        )
    _download(wanted, commit, {name: sizes[name] for name in weights}, progress)
    return Snapshot(directory, commit)


def _unknown(wanted: HubName, commit: str) -> list[str]:
    """Files of tokens of which the cache knows neither that the repository has them nor that it has not.

    Releases before the one that reads them did not fetch them.
    """
    return [
        name
        for name in (SPECIAL_MAP, ADDED)
        if try_to_load_from_cache(wanted.repository, name, revision=commit) is None
    ]


def _download(wanted: HubName, commit: str, sizes: dict[str, int], progress: Progress) -> dict[str, Path]:
    known = {name: try_to_load_from_cache(wanted.repository, name, revision=commit) for name in sizes}
    missing = [name for name, path in known.items() if not isinstance(path, str)]
    paths = {name: Path(path) for name, path in known.items() if isinstance(path, str)}
    if not missing:
        return paths
    num_bytes = sum(sizes[name] for name in missing)
    _require_room(wanted, num_bytes)
    bar = DownloadBar(progress, wanted.repository, num_bytes)
    try:
        # One after the other, in this thread: Ctrl-C ends it at once, and what has arrived is kept.
        for name in missing:
            paths[name] = Path(
                huggingface_hub.hf_hub_download(
                    wanted.repository, name, revision=commit, tqdm_class=_bar_class(bar.advance)
                )
            )
    finally:
        bar.close()
    return paths


def _require_room(wanted: HubName, num_bytes: int) -> None:
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise BadModel(
            f"the model {wanted} does not fit into {cache}",
            why=f"{size_text(num_bytes)} must be fetched, but only {size_text(free)} are free",
            do="make room (`hf cache ls` shows what is there), or set HF_HOME to a larger disk",
        )


def _bar_class(advance: Callable[[int], None]) -> Any:
    class Bar:
        """As much of tqdm as a download uses."""

        def __init__(self, *_: object, total: float | None = None, initial: int = 0, **__: object) -> None:
            self.total, self.n = total, initial

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            advance(int(n or 0))

        def update_transfer(self, _n: float | None = 1) -> None:
            """Its presence tells the library that one bar is enough where bytes arrive packed and are unpacked."""

        def _nothing(self, *_: object, **__: object) -> None:
            """Nothing to do: `DownloadBar` computes the rate, redraws itself when due, and outlives one file."""

        set_postfix_str = refresh = close = _nothing

    return Bar


def _without_hub(wanted: HubName, error: Exception, progress: Progress) -> Snapshot:
    """The cached revision, if the hub cannot be reached. Raises BadModel if it said no, or nothing is cached."""
    explained = _explained(wanted, error)
    if isinstance(error, RepositoryNotFoundError | RevisionNotFoundError) or _status(error) in (401, 403):
        raise explained from error
    cached = find_cached(wanted)
    if cached is None:
        raise explained from error
    reason = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{constants.ENDPOINT} does not answer"
    progress.note(f"{reason}: {wanted} is taken from the cache, as it was last seen")
    # Tokens listed in tokenizer_config.json are all that count; such files beside it are not read.
    if read_texts(cached.path)[0].own_ids_win and (unknown := _unknown(wanted, cached.commit)):
        progress.note(
            f"an older release fetched it without {' and '.join(unknown)}: if the repository has them, tokens may be"
            " missing until it is started with the hub once"
        )
    return cached


def _explained(wanted: HubName, error: Exception) -> BadModel:
    endpoint, repository = constants.ENDPOINT, wanted.repository
    what = f"the model {wanted} cannot be fetched"
    match error:
        case BadModel():
            return error
        case GatedRepoError():
            why = f"{endpoint} gives it only to those who have accepted its conditions"
            do = f"accept them at {endpoint}/{repository}, then `hf auth login`, or set HF_TOKEN"
        case RevisionNotFoundError():
            why = f"{endpoint} has the repository, but no revision {wanted.revision!r} of it"
            do = "name a branch, a tag or a commit after the @, or leave it out"
        case RepositoryNotFoundError():
            why = f"{endpoint} has no such repository or does not show it to you, and there is no such directory here"
            do = "correct the name; if it is private, `hf auth login`, or set HF_TOKEN"
        case HfHubHTTPError() if _status(error) in (401, 403):
            why = f"{endpoint} refuses: {_shown(error)}"
            do = "set HF_TOKEN to a token that may read it, or log in again with `hf auth login`"
        case _ if constants.is_offline_mode() or isinstance(error, OfflineModeIsEnabled):
            why = f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} does not have all of it"
            do = f"unset it once, or fetch the model elsewhere: {_by_hand(wanted)}"
        case _:
            why = f"{endpoint} cannot be reached, or the transfer broke off: {_shown(error)}"
            do = f"try again (complete files are kept), or fetch it where there is a network: {_by_hand(wanted)}"
    return BadModel(what, why=why, do=do)


def _by_hand(wanted: HubName) -> str:
    revision = f" --revision {wanted.revision}" if wanted.revision else ""
    return f"`hf download {wanted.repository}{revision} --local-dir DIR`, then `--model DIR`"


def _status(error: BaseException) -> int:
    response: Any = getattr(error, "response", None)
    return getattr(response, "status_code", 0)


def _shown(error: BaseException) -> str:
    texts = dict.fromkeys(" ".join(str(cause).split()) or type(cause).__name__ for cause in _chain(error))
    return "; ".join(texts)[:_SHOWN_ERROR_CHARS]


def _chain(error: BaseException) -> Iterable[BaseException]:
    # The first tells people most, the last is the system's own message.
    last = error
    while (cause := last.__cause__ or last.__context__) is not None:
        last = cause
    return (error, last)
