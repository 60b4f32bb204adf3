"""The model that a mesh serves: from its name in the settings to files on this machine, the same for all actors.

Called by `meshctl up`, and by commands that plan a topology without starting it: those fetch nothing.
"""

import os
import signal
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from cli.errors import BadConfig, BadModel
from cli.hub.name import HubName, parse_hub_name
from cli.plan.compute_dtype import ComputeDtype, choose_dtype
from cli.plan.settings import Settings
from cli.supervisor.processes.by_pid import on_signals
from cli.supervisor.told.progress import Progress
from nodes.model_spec import ModelError, ModelSpec, describe_model
from nodes.model_spec.end_tokens import with_vocabulary
from nodes.model_spec.fingerprint import WeightsReader, with_known_fingerprint
from nodes.model_spec.small_files import read_template_file
from nodes.model_spec.template_files import require_template
from nodes.sizes import progress_text
from nodes.tokenizer.child.checking import TextFacts, check_texts
from nodes.tokenizer.errors import Overloaded, TemplateError

_CPUINFO: Final = Path("/proc/cpuinfo")
_SHORT_COMMIT: Final = 12
"""As git abbreviates in large repositories; the path beside it has the whole one."""


class ModelNotHere(BadModel):
    """The model is on the hub and not in the cache, and nothing is to be fetched."""


class ModelPlan(NamedTuple):
    """`argument` is how every actor finds `spec`; `origin` tells clients where it is from (empty: `argument`).

    `settings` are completed with what follows from the model: the dtype to compute in, and the template's full path.
    `texts` is what was found out about tokenizer and chat template, `notes` what people should know about the model.
    """

    settings: Settings
    spec: ModelSpec
    argument: str
    texts: TextFacts
    origin: str = ""
    notes: tuple[str, ...] = ()


def plan_model(settings: Settings, progress: Progress, *, fetches: bool, reading: Progress | None = None) -> ModelPlan:
    """Find the model, or with `fetches` fetch it. Raises BadModel, BadConfig, or without `fetches` ModelNotHere.

    `reading` is told how far reading its weights is, for the fingerprint; None: they are not read, and it has its own
    only if that is known already.
    """
    template = _template_path(settings.chat_template)
    argument, origin = _locate(settings, progress, fetches=fetches)
    try:
        spec = describe_model(argument, settings.pooling)
    except ModelError as error:
        raise _bad_model(settings, error) from error
    if not spec.has_head and spec.pooling is None:
        raise BadModel(
            f"the model {settings.model!r} cannot be served",
            why="it has no head, so it makes no text, and none of its files says how it makes vectors",
            do="say how with --pooling: last, mean or cls, with `,normalize` behind it if they are of length one",
        )
    if (
        not spec.has_head
        and settings.own_host is None
        and (settings.prefill, settings.decode, settings.mixed) == (None,) * 3
    ):
        # A vector is a prefill: there is nothing to hand over, and a second group would take half of the cores.
        settings = msgspec.structs.replace(settings, mixed=1)
    with _weights_read(spec, reading) as read:
        # Beside each other: the one keeps a process of its own waiting, the other takes what cores are left.
        texts = _check_texts(settings, spec)
        try:
            spec = read.result()
        except ModelError as error:
            raise _bad_model(settings, error) from error
    dtype = choose_dtype(settings.dtype, spec, settings.device, _cpu_flags())
    settings = msgspec.structs.replace(settings, dtype=dtype.dtype, chat_template=template)
    # The pools' layouts are made from this spec: a worker that computed by another would be refused its pool.
    own = with_vocabulary(spec, texts.vocabulary).within(settings.context_length or 0).quantized(settings.quantize)
    own = msgspec.structs.replace(own, template_reads=texts.reads)
    return ModelPlan(settings, own, argument, texts, origin, (*_notes(settings, own, dtype), *texts.notes))


@contextmanager
def _weights_read(spec: ModelSpec, reading: Progress | None) -> Generator[Future[ModelSpec]]:
    """`spec` with its fingerprint, from a thread that ends with this context."""
    shown = reading or Progress(None)
    reader = WeightsReader(lambda done, size: shown.working("weights", f"read {progress_text(done, size)}"))
    with ThreadPoolExecutor(1, "weights") as thread:
        try:
            yield thread.submit(with_known_fingerprint if reading is None else reader.read, spec)
        finally:
            # What fails meanwhile is said at once, however large the model is.
            reader.stop()


def _bad_model(settings: Settings, error: ModelError) -> BadModel:
    do = "correct it, or give another with --model (`meshctl models` lists those that need no files)"
    return BadModel(f"the model {settings.model!r} cannot be served", why=error.message, do=do)


def names_hub(model: str) -> bool:
    """Whether `model` is one of the hub: the name has the form, and is no directory here."""
    return parse_hub_name(model) is not None and not os.path.isdir(model)


def _notes(settings: Settings, spec: ModelSpec, dtype: ComputeDtype) -> tuple[str, ...]:
    notes = [dtype.note] if dtype.note else []
    if said := spec.sampling_defaults.describe():
        notes.append(f"requests without sampling parameters of their own use {spec.name}'s defaults: {said}")
    if not settings.context_length and spec.max_context_length > spec.context_length:
        notes.append(
            f"{spec.name} serves {spec.context_length:,} tokens, as its config.json says, and was made for up to"
            f" {spec.max_context_length:,} ({spec.max_context_reason}): for more, use --context-length"
        )
    return (*notes, *spec.notes)


def _locate(settings: Settings, progress: Progress, *, fetches: bool) -> tuple[str, str]:
    """The model as every actor finds it, whatever directory it runs in, and its origin."""
    model = settings.model
    if model.partition("?")[0] in ("tiny", "echo") or model.startswith("random:"):
        return model, ""
    wanted = parse_hub_name(model)
    repository, at, revision = model.partition("@")
    if wanted is None and at and parse_hub_name(repository) is not None and not os.path.exists(model):
        raise BadModel(
            f"the model {model!r} cannot be fetched",
            why=f"{revision!r} is not a branch, tag or commit" if revision else "there is no revision after the @",
            do=f"give one, or leave it out: --model {repository}",
        )
    if wanted is None or not names_hub(model):
        try:
            path = _absolute(model)
        except (OSError, ValueError) as error:
            do = "give its absolute path, or start the command in a directory that exists"
            raise BadModel(f"the model {model!r} cannot be found", why=_no_path(error), do=do) from error
        if wanted is not None:
            progress.note(f"{model} is the directory {path} here, which takes precedence over a model of the hub")
        return path, ""
    # The import takes a third of a second, so only a model of the hub pays for it.
    from cli.hub import files as hub

    if fetches:
        # These signals end it as Ctrl-C does: half a file may be gigabytes, and nobody would remove it.
        with on_signals((signal.SIGTERM, signal.SIGHUP), _interrupt):
            snapshot = hub.fetch(wanted, progress, lambda spec: _check_texts(settings, spec))
    else:
        found = hub.find_cached(wanted)
        if found is None:
            raise ModelNotHere(
                f"the model {wanted} is not on this machine",
                why="this command fetches nothing, and the model is neither in the hub's cache nor a directory here",
                do=_fetch_by_hand(wanted),
            )
        snapshot = found
    progress.note(f"{wanted} is {snapshot.commit[:_SHORT_COMMIT]}, in {snapshot.path}")
    return str(snapshot.path), f"{wanted.repository}@{snapshot.commit}"


def _fetch_by_hand(wanted: HubName) -> str:
    revision = f" --revision {wanted.revision}" if wanted.revision else ""
    return f"`meshctl up --model {wanted}` fetches it, and so does `hf download {wanted.repository}{revision}`"


def _interrupt(_number: int, _frame: Any) -> None:
    raise KeyboardInterrupt


def _template_path(file: str) -> str:
    try:
        path = _absolute(file) if file else ""
    except (OSError, ValueError) as error:
        raise _bad_template(file, _no_path(error)) from error
    if file:
        # What a fetch of an hour would not change is said before it.
        _read_template(file)
    return path


def _absolute(path: str) -> str:
    """As actors find it, which may run in another directory. Raises OSError or ValueError."""
    return os.path.realpath(os.path.expanduser(path))


def _no_path(error: OSError | ValueError) -> str:
    is_relative = isinstance(error, OSError)
    return f"it is relative to the working directory, which is gone: {error.strerror}" if is_relative else str(error)


def _read_template(file: str) -> str:
    try:
        return read_template_file(Path(_absolute(file)))
    except ModelError as error:
        raise _bad_template(file, error.message) from error


def _check_texts(settings: Settings, spec: ModelSpec) -> TextFacts:
    model, file = settings.model, settings.chat_template
    try:
        if not file:
            require_template(spec)
        return check_texts(spec, _read_template(file) if file else spec.chat_template)
    except TemplateError as error:
        if file:
            raise _bad_template(file, error.message) from error
        raise BadModel(
            f"the chat template of the model {model!r} cannot be used",
            why=error.message,
            do="give another with --chat-template FILE",
        ) from error
    except (ModelError, Overloaded) as error:
        do = (
            "give another with --model, or correct it"
            if isinstance(error, ModelError)
            else "see what keeps Python from starting here"
        )
        raise BadModel(f"the model {model!r} cannot be served", why=error.message, do=do) from error


def _bad_template(file: str, why: str) -> BadConfig:
    return BadConfig(f"the chat template {file} cannot be used", why=why, do="give another --chat-template")


def _cpu_flags() -> frozenset[str]:
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(found.partition(":")[2].split())
