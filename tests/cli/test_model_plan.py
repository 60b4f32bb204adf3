"""What follows from a model before anything is started: dtype, chat template, and what is said of them."""

import time
from pathlib import Path

import msgspec
import pytest

from cli.commands.up import plan
from cli.errors import BadConfig, BadModel
from cli.hub.download_bar import DownloadBar, bar_text
from cli.plan import model as model_plan
from cli.plan.compute_dtype import choose_dtype
from cli.plan.model import names_hub, plan_model
from cli.plan.settings import KVSettings, Settings
from cli.plan.spec import host_spec, shared_settings
from cli.plan.topology import plan_topology
from cli.supervisor.told.progress import Progress
from nodes.model_spec import WeightsChanged, file_hash, resolve_model
from nodes.model_spec.file_hash import FileHasher
from nodes.model_spec.hash_cache import forget_hashes
from nodes.models.pooling import Pooling
from nodes.sizes import size_text
from nodes.tokenizer.errors import Overloaded
from nodes.worker.config import WorkerConfig
from tests.cli.launches import MACHINE, configs
from tests.cli.refused import refused
from tests.nodes.checkpoints import LLAMA, write_model, write_modules

ECHO = resolve_model("echo")
HALF = msgspec.structs.replace(resolve_model("random:tiny-llama"), dtype="float16", name="half")


@pytest.mark.parametrize(
    ("device", "flags", "dtype", "words"),
    [
        ("cpu", {"avx2", "avx512f"}, "float32", "float32, since this CPU has no kernels for 16 bits"),
        ("cpu", {"avx2", "avx512_bf16"}, "bfloat16", "bfloat16, this CPU's format, which keeps 8 of their 11"),
        ("cpu", {"amx_bf16"}, "bfloat16", "this CPU's"),
        ("cpu", {"asimd", "bf16"}, "bfloat16", "this CPU's"),
        ("cuda", set(), "bfloat16", "bfloat16, the device's format"),
        ("cuda:1", {"avx2"}, "bfloat16", "the device's format"),
    ],
)
def test_float16_is_bfloat16_where_that_is_the_devices_format_and_it_is_said(device, flags, dtype, words):
    chosen = choose_dtype("auto", HALF, device, flags)
    assert chosen.dtype == dtype == HALF.compute_dtype(chosen.dtype)
    assert words in chosen.note
    for asked in ("float32", "bfloat16"):
        assert choose_dtype(asked, HALF, device, flags) == (asked, ""), "whoever asks gets it"
    plain = resolve_model("random:qwen3-0.6b")
    assert choose_dtype("auto", plain, device, flags) == ("auto", "")


def planned(tmp_path, **settings):
    """The plan, and what was said."""
    with (tmp_path / "said").open("wb") as said:
        plan = plan_model(Settings(**settings), Progress(said.fileno()), fetches=False)
    return plan, (tmp_path / "said").read_text()


def test_what_a_checkpoint_asks_for_is_said(tmp_path, monkeypatch):
    directory = write_model(tmp_path / "half", LLAMA | {"torch_dtype": "float16"})
    (directory / "generation_config.json").write_text('{"top_k": 20, "typical_p": 0.9}')
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx512_bf16 sse\n")
    monkeypatch.setattr(model_plan, "_CPUINFO", tmp_path / "cpuinfo")
    plan, _ = planned(tmp_path, model=str(directory))
    assert (plan.settings.dtype, plan.argument, plan.origin) == ("bfloat16", str(directory), "")
    half, sampled, left_out = plan.notes
    assert half.startswith("half has float16 weights: computed in bfloat16")
    assert sampled == "requests without sampling parameters of their own use half's defaults: top_k 20"
    assert left_out == "half asks for typical_p 0.9, which is not supported and left out"
    monkeypatch.setattr(model_plan, "_CPUINFO", tmp_path / "none")
    assert planned(tmp_path, model=str(directory))[0].settings.dtype == "float32"


def test_weights_are_read_once_for_all_workers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Where nothing can be kept, either.
    (tmp_path / "cache").write_text("")
    directory = str(write_model(tmp_path / "m", LLAMA))
    now_ns, hashed, hash_file = time.time_ns, [], FileHasher.hash
    monkeypatch.setattr(file_hash.time, "time_ns", lambda: now_ns() + 10**10)
    monkeypatch.setattr(FileHasher, "hash", lambda self, path: hashed.append(path) or hash_file(self, path))
    assert planned(tmp_path, model=directory)[0].spec.fingerprint.endswith("-unread")
    assert hashed == [], "for a command that starts nothing"
    plans = [
        plan_model(Settings(model=directory), Progress(None), fetches=False, reading=Progress(None)) for _ in range(2)
    ]
    assert hashed == [f"{directory}/model.safetensors"]
    for each in plans:
        topology = plan_topology(each.settings, each.spec, each.argument, MACHINE)
        forget_hashes()
        for config in configs(topology, "worker"):
            worker = msgspec.json.decode(msgspec.json.encode(config), type=WorkerConfig)
            assert worker.spec().fingerprint == each.spec.fingerprint
    assert len(hashed) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_weights_that_change_while_they_are_read_cannot_be_served(tmp_path, monkeypatch, fails):
    directory = str(write_model(tmp_path / "m", LLAMA))

    def changing(self, path):
        raise WeightsChanged(f"{path} was changed while it was read.")

    monkeypatch.setattr(FileHasher, "hash", changing)
    if fails:
        # Said at once, whatever reading comes to.
        monkeypatch.setattr(model_plan, "check_texts", lambda *_: (_ for _ in ()).throw(Overloaded("no process")))
    with refused(BadModel, "cannot be served", why="no process" if fails else "was changed while it was read"):
        plan_model(Settings(model=directory), Progress(None), fetches=False, reading=Progress(None))


def test_a_network_without_a_head_needs_to_be_told_how_it_makes_vectors(tmp_path):
    directory = str(write_model(tmp_path / "m", LLAMA | {"architectures": ["LlamaModel"]}))
    with refused(BadModel, f"the model '{directory}' cannot be served", do="say how with --pooling: last, mean or cls"):
        planned(tmp_path, model=directory)
    plan, _ = planned(tmp_path, model=directory, pooling="mean,normalize", mixed=1)
    assert plan.spec.pooling == Pooling(pool="mean", normalize=True)
    topology = plan_topology(plan.settings, plan.spec, plan.argument, MACHINE)
    (worker,) = configs(topology, "worker")
    assert worker.spec().pooling == plan.spec.pooling
    # All hosts of a mesh must make the same vectors.
    assert host_spec(plan.settings, plan.spec, topology.context, "")["pooling"] == "mean,normalize"
    assert shared_settings(plan.settings, "m")["pooling"] == "mean,normalize"


def test_of_vectors_alone_the_longest_input_is_the_context_and_nothing_ends(tmp_path):
    directory = write_model(tmp_path / "m", LLAMA | {"architectures": ["LlamaModel"], "max_position_embeddings": 64})
    mean = {"embedding_dimension": LLAMA["hidden_size"], "pooling_mode": "mean"}
    write_modules(directory, ("Pooling", mean), sentence_bert_config__json={"max_seq_length": 24})
    plan, _ = planned(tmp_path, model=str(directory))
    topology = plan_topology(plan.settings, plan.spec, plan.argument, MACHINE)
    assert (topology.context.length, topology.context.model_length) == (24, 64)
    assert "ends with" not in topology.limits
    assert not [note for note in plan.notes if "end token" in note]
    # A longer one is served where it is asked for.
    plan, _ = planned(tmp_path, model=str(directory), context_length=48)
    assert plan_topology(plan.settings, plan.spec, plan.argument, MACHINE).context.length == 48


YARN = LLAMA | {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}


def test_a_longer_context_is_told_of_served_and_bounded(tmp_path):
    directory = str(write_model(tmp_path / "m", YARN))
    plan, _ = planned(tmp_path, model=directory)
    words = "m serves 64 tokens, as its config.json says, and was made for up to 256 (YaRN: 64 × 4)"
    assert plan.notes == (f"{words}: for more, use --context-length",)
    for given in (63, 64, 256):
        assert planned(tmp_path, model=directory, context_length=given)[0].notes == ()

    def topology(context_length):
        plan, _ = planned(tmp_path, model=directory, context_length=context_length, mixed=1)
        return plan_topology(plan.settings, plan.spec, plan.argument, MACHINE)

    assert str(topology(None).context) == "KV: 16,384 tokens; context 64"
    longest = topology(256)
    assert str(longest.context) == "KV: 16,384 tokens; context 256"
    (worker,) = configs(longest, "worker")
    assert worker.spec().context_length == 256, "its limits are made from this"
    served = [configs(longest, role)[0].context_length for role in ("gateway", "tokenizer", "scheduler", "worker")]
    assert served == [256] * 4
    with refused(BadConfig, "context of 257 tokens", why="m was made for 256 (YaRN: 64 × 4)"):
        topology(257)


def test_models_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for named in ("tiny", "echo", "echo?step_ms=3", "random:tiny-llama?seed=1"):
        plan, said = planned(tmp_path, model=named)
        assert (plan.argument, plan.notes, said) == (named, (), "")
    write_model(Path("here"), LLAMA)
    assert planned(tmp_path, model="./here")[0].argument == str(tmp_path / "here")
    with pytest.raises(BadModel, match="no model directory"):
        planned(tmp_path, model="./nowhere")


def test_paths_that_are_no_model(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for model, what, why in (
        ("./here", "'./here' cannot be found", "relative to the working directory, which is gone"),
        ("here", "'here' cannot be found", "relative to the working directory, which is gone"),
        ("/" + "a" * 300, "cannot be served", "File name too long"),
        ("/" + "a" * 5000, "cannot be served", "File name too long"),
        ("/a\0b", "cannot be found", "null byte"),
        ("~nobody-of-that-name/a/b", "'~nobody-of-that-name/a/b' cannot be found", "is gone"),
        (str(write_model(tmp_path / "m\udcff", LLAMA)), r"m\\udcff' cannot be served", "is not UTF-8"),
    ):
        with refused(BadModel, what, why=why):
            planned(tmp_path, model=model)
    assert names_hub("org/name")
    assert planned(tmp_path, model="tiny")[0].argument == "tiny"
    with refused(BadConfig, "chat template x.jinja cannot be used", why="which is gone"):
        planned(tmp_path, model="tiny", chat_template="x.jinja")
    settings = Settings(model="tiny", kv=KVSettings(directory="pools"))
    with refused(BadConfig, "KV pools cannot be placed in pools", why="No such file or directory"):
        plan(settings, Progress(None), fetches=False)


def test_a_chat_template_is_compiled_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("good.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    Path("bad.jinja").write_text("{% for m in messages %}")
    Path("lossy.jinja").write_text("{% for m in messages %}{{ m.text }}{% endfor %}")
    plan, _ = planned(tmp_path, model="echo", chat_template="good.jinja")
    assert plan.settings.chat_template == str(tmp_path / "good.jinja"), "actors run elsewhere"
    for file, words in (
        ("bad.jinja", "cannot be compiled"),
        ("none.jinja", "cannot be read as text"),
        ("lossy.jinja", "leaves out what users say"),
    ):
        with pytest.raises(BadConfig, match=f"{file} cannot be used(.|\n)*{words}"):
            planned(tmp_path, model="echo", chat_template=file)


def test_a_models_own_texts_are_checked_before_anything_starts(tmp_path):
    directory = write_model(tmp_path / "m", LLAMA)
    assert planned(tmp_path, model=str(directory))[0].notes == ()
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.text }}{% endfor %}")
    with pytest.raises(BadModel, match=r"leaves out what users say(.|\n)*--chat-template FILE") as caught:
        planned(tmp_path, model=str(directory))
    assert str(directory) in caught.value.what
    (tmp_path / "good.jinja").write_text("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}")
    plan, _ = planned(tmp_path, model=str(directory), chat_template=str(tmp_path / "good.jinja"))
    assert plan.notes == ("the chat template leaves out messages of the role tool: such chats are refused",)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(BadModel, match=r"tokenizer\.json cannot be loaded"):
        planned(tmp_path, model=str(directory))


def test_no_process_for_the_check(tmp_path, monkeypatch):
    def refuse(*args):
        raise Overloaded("no process can be started")

    monkeypatch.setattr(model_plan, "check_texts", refuse)
    with pytest.raises(BadModel, match="keeps Python from starting"):
        planned(tmp_path, model="echo")


def test_a_bar_says_how_much_how_fast_and_how_long_still():
    assert bar_text("m", 0, 7_600_000_000, 0.0) == "m [------------------------] 0.0 of 7.6 GB"
    text = bar_text("m", 3_100_000_000, 7_600_000_000, 62.0)
    assert text == "m [#########---------------] 3.1 of 7.6 GB, 50.0 MB/s, 90 s left"
    assert bar_text("m", 2_000, 2_000, 2.0) == f"m [{'#' * 24}] 2.0 of 2.0 kB, 1.0 kB/s"
    assert bar_text("m", 0, 0, 0.0).startswith(f"m [{'#' * 24}]"), "an empty file is there"
    assert [size_text(n) for n in (10, 45_000_000, 7_600_000_000)] == ["0.0 kB", "45.0 MB", "7.6 GB"]


def drawn(tmp_path, *, is_terminal):
    """What a download of 100 MB in 30 s shows."""
    now = 0.0
    with (tmp_path / "bar").open("wb") as out:
        bar = DownloadBar(Progress(out.fileno(), is_terminal=is_terminal), "m", 100_000_000, lambda: now)
        for _ in range(100):
            now += 0.3
            bar.advance(1_000_000)
        bar.close()
    return (tmp_path / "bar").read_bytes().decode()


def test_a_terminal_sees_one_line_and_a_log_a_few(tmp_path):
    terminal = drawn(tmp_path, is_terminal=True)
    assert terminal.count("\r") == 101
    assert (terminal.count("\n"), terminal[-1]) == (1, "\n")
    lines = drawn(tmp_path, is_terminal=False).splitlines()
    assert "\r" not in "".join(lines)
    assert len(lines) == 4
    assert "fetching m: 100.0 MB" in lines[0]
    assert "100.0 of 100.0 MB" in lines[-1]


def test_what_makes_vectors_only_has_one_group_unless_others_are_asked_for(tmp_path):
    for model, options, groups in (
        ("random:tiny-bert", {}, (0, 0, 1)),
        ("random:tiny-bert", {"prefill": 2}, (2, 1, 0)),
        ("random:tiny-qwen3", {"pooling": "last"}, (1, 1, 0)),
    ):
        assert planned(tmp_path, model=model, **options)[0].settings.groups == groups
