"""The tokenizer among others, in one process: asked by a gateway, following schedulers."""

import asyncio
import contextlib
import json
import shutil
import struct
import threading
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import structlog

from kvstore.hashing import chain_hashes, pack_tokens, root_hash
from kvstore.protocol import CacheEvents, PagesStored
from mesh.actor import Actor
from mesh.address import Address
from mesh.errors import RemoteError
from mesh.options import SystemOptions
from mesh.simulation.network import SimulatedNetwork
from mesh.testing.actors import Actors
from mesh.wire.frames import PeerDown
from nodes.asks import asked
from nodes.asks.grammar import Grammar
from nodes.model_spec import ModelDamaged, resolve_model
from nodes.model_spec.end_tokens import with_vocabulary
from nodes.model_spec.token_bytes import token_bytes
from nodes.model_spec.vocabulary import load_tokenizer, vocabulary_facts
from nodes.protocol import (
    PROMPT_TAIL_CHARS,
    ChooseMoves,
    ChooseRoute,
    DescribeTemplate,
    DescribeTokenizer,
    DescribeVocabulary,
    Detokenize,
    Detokenized,
    Load,
    MovesChosen,
    Prepare,
    Prepared,
    StopAt,
)
from nodes.registry.actor import RegistryActor
from nodes.request import VECTORS
from nodes.roles import DETOKENIZER, GATEWAY, KV_EVENTS_TOPIC, LOAD_TOPIC, NODE_CODEC, SCHEDULER, WORKER
from nodes.tokenizer.actor import TokenizerActor
from nodes.tokenizer.config import TokenizerConfig
from nodes.tokenizer.texts.encoding import TextEncoder
from tests.mesh.mesh_under_test import until

TINY = Path(__file__).parents[3] / "nodes" / "bundled" / "tiny"

PROMPT = list(b"a prompt of some pages, which one of the schedulers has in its cache")
QUICK = SystemOptions(heartbeat_s=0.05, retry_min_s=0.01, retry_max_s=0.05)


class Peer(Actor):
    codec = NODE_CODEC

    def __init__(self, role):
        self.role = role


@contextlib.asynccontextmanager
async def mesh_with(model="echo", schedulers=("s0", "s1"), **config):
    mesh = Actors(SimulatedNetwork(seed=0), QUICK)
    await mesh.start("registry", RegistryActor(lease_s=1.0))
    for actor_id in schedulers:
        await mesh.start(actor_id, Peer(SCHEDULER), group=actor_id, phase="mixed", page_size=16, asks=[VECTORS])
    await mesh.start("detok", Peer(DETOKENIZER))
    mesh.tokenizer = TokenizerActor(TokenizerConfig(model=model, **config))
    await mesh.start("tok", mesh.tokenizer)
    mesh.gateway = Peer(GATEWAY)
    await mesh.start("gw", mesh.gateway)
    expected = {"detok", "tok", *schedulers}
    for actor in (mesh.gateway, mesh.tokenizer):
        await until(lambda of=actor: expected <= {m.actor_id for m in of.ctx.members.all() if m.state == "ready"})
    try:
        yield mesh
    finally:
        await mesh.stop()


@pytest.fixture
def mesh(settings):
    return mesh_with(**settings)


async def ask(mesh, message):
    return (await mesh.gateway.ctx.ask("tok", message, timeout_s=20)).message


async def failure(mesh, message):
    with pytest.raises(RemoteError) as caught:
        await ask(mesh, message)
    return caught.value.code, caught.value.param, caught.value.retryable


def chat(content, **fields):
    return Prepare(request_id="r", chat=json.dumps([{"role": "user", "content": content}]).encode(), **fields)


async def test_texts_ids_and_chats_are_prepared(mesh):
    prepared = await ask(mesh, Prepare(request_id="r", texts=["ab", "c"]))
    assert prepared.token_ids == [list(b"ab"), list(b"c")]
    assert [r.detokenizer for r in prepared.routes] == ["detok"] * 2
    assert {r.decode for r in prepared.routes} <= {"s0", "s1"}
    prepared = await ask(mesh, Prepare(request_id="r", token_ids=[[1, 2, 3]]))
    assert prepared.token_ids == [[1, 2, 3]]
    prepared = await ask(mesh, chat("hello"))
    assert prepared.token_ids == [list(b"hello")]
    answer = await ask(mesh, Prepare(request_id="r", texts=["x"], route=False))
    assert answer == Prepared(token_ids=[[120]], elapsed_s=answer.elapsed_s)
    assert 0 < answer.elapsed_s < 5


async def test_a_template_that_does_not_compile_is_said_at_the_start_and_prompts_are_served(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    (model / "chat_template.jinja").write_text("{% for %}")
    with structlog.testing.capture_logs() as logs:
        async with mesh_with(str(model)) as mesh:
            assert (await failure(mesh, chat("hello")))[:2] == ("template_error", "messages")
            assert (await ask(mesh, Prepare(request_id="r", texts=["hello"]))).token_ids
    (said,) = [entry for entry in logs if entry["event"] == "no chats"]
    assert "cannot be compiled" in said["why"]


@pytest.mark.settings(model="random:tiny-qwen2")
async def test_chat_is_rendered_by_the_models_template(mesh):
    (token_ids,) = (await ask(mesh, chat("hi"))).token_ids
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert await ask(mesh, Detokenize(token_ids=token_ids)) == Detokenized(text=text)
    shown = await ask(mesh, Detokenize(token_ids=token_ids, skip_special_tokens=True))
    assert shown == Detokenized(text="user\nhi\nassistant\n")


@pytest.mark.settings(context_length=64)
async def test_what_cannot_be_served_is_refused_by_name(mesh):
    assert await failure(mesh, Prepare(request_id="r")) == ("invalid_request", None, False)
    assert await failure(mesh, Prepare(request_id="r", texts=[], token_ids=[])) == ("invalid_request", None, False)
    assert await failure(mesh, Prepare(request_id="r", texts=[""])) == ("empty_prompt", "prompt", False)
    assert await failure(mesh, Prepare(request_id="r", token_ids=[[259]])) == ("invalid_token_id", "prompt", False)
    assert await failure(mesh, Prepare(request_id="r", token_ids=[[-1]], route=False)) == (
        "invalid_token_id", "prompt", False,
    )  # fmt: skip
    assert await failure(mesh, ChooseRoute(request_id="r", token_ids=[-1])) == ("invalid_token_id", "prompt", False)
    bad = ChooseMoves(holder="s0", returns_in_s=9.0, requests=[ChooseRoute(request_id="r", token_ids=[-1])])
    assert await failure(mesh, bad) == ("invalid_token_id", "prompt", False)
    assert await failure(mesh, Detokenize(token_ids=[300])) == ("invalid_token_id", "tokens", False)
    for text in ("x" * 64, "x" * 10_000_000):
        assert await failure(mesh, Prepare(request_id="r", texts=[text])) == (
            "context_length_exceeded", "prompt", False,
        )  # fmt: skip
    assert await failure(mesh, chat("x" * 64)) == ("context_length_exceeded", "messages", False)
    # The template stops rendering, in a process of its own that knows characters only.
    assert await failure(mesh, chat("x" * 10_000_000)) == ("context_length_exceeded", "messages", False)
    with pytest.raises(RemoteError, match="64 tokens"):
        await ask(mesh, chat("x" * 10_000_000))
    assert await failure(mesh, chat([{"type": "image_url"}])) == ("unsupported_content", "messages", False)
    assert await failure(mesh, Prepare(request_id="r", chat=b"{")) == ("template_error", "messages", False)
    assert await failure(mesh, StopAt(attempts=[])) == ("not_served", None, False)


@pytest.mark.settings(context_length=64)
async def test_tokens_are_counted_whatever_the_context_is(mesh):
    for num_chars in (64, 2_000_000):
        text = "x" * num_chars
        assert len((await ask(mesh, Prepare(request_id="r", texts=[text], route=False))).token_ids[0]) == num_chars
        counted = await ask(mesh, msgspec.structs.replace(chat(text), route=False))
        assert len(counted.token_ids[0]) == num_chars


@pytest.mark.settings(context_length=64)
async def test_a_prompt_is_cut_to_what_the_request_asks_for(mesh):
    for fields in ({"texts": ["x" * 100 + "ab"]}, {"token_ids": [[120] * 100 + [97, 98]]}, {"texts": ["ab"]}):
        last = await ask(mesh, Prepare(request_id="r", truncate_to=2, **fields))
        assert (last.token_ids, len(last.routes)) == ([[97, 98]], 1)
    first = await ask(mesh, Prepare(request_id="r", texts=["ab" + "x" * 100], truncate_to=2, truncate_end=True))
    assert first.token_ids == [[97, 98]]
    # Longer than any text that could fit: it is cut, not refused.
    for question in (Prepare(request_id="r", texts=["x" * 2_000_000 + "ab"]), chat("x" * 2_000_000 + "ab")):
        assert (await ask(mesh, msgspec.structs.replace(question, truncate_to=2))).token_ids == [[97, 98]]
    tails = [
        (await ask(mesh, msgspec.structs.replace(chat("hello"), truncate_to=most, truncate_end=True))).prompt_tail
        for most in (4, 5, 6)
    ]
    assert tails == ["", "", "hello"], "the end of a chat that was cut off says nothing of its answer"
    refused = Prepare(request_id="r", texts=["x" * 100], truncate_to=64)
    assert await failure(mesh, refused) == ("context_length_exceeded", "prompt", False)


@pytest.mark.settings(schedulers=())
async def test_without_a_scheduler_there_is_no_capacity(mesh):
    assert await failure(mesh, Prepare(request_id="r", texts=["x"])) == ("no_capacity", None, True)
    assert await failure(mesh, chat("x")) == ("no_capacity", None, True)
    assert await failure(mesh, ChooseRoute(request_id="r", token_ids=[1])) == ("no_capacity", None, True)
    assert (await ask(mesh, Prepare(request_id="r", texts=["x"], route=False))).routes == []


@pytest.mark.settings(inline_chars=10, max_long_texts=2)
async def test_long_texts_are_encoded_in_a_thread_and_bounded(mesh):
    text = "some words " * 5000
    prepared = await ask(mesh, Prepare(request_id="r", texts=[text]))
    assert prepared.token_ids == [list(text.encode())]
    asks = [ask(mesh, Prepare(request_id=f"r{i}", texts=[text])) for i in range(4)]
    results = await asyncio.gather(*asks, return_exceptions=True)
    refused = [r for r in results if isinstance(r, RemoteError)]
    assert [(r.code, r.retryable) for r in refused] == [("overloaded", True)] * 2
    assert mesh.tokenizer.stats()["mesh_tokenizer_long_texts"] == 0


@pytest.mark.settings(inline_chars=10, max_counted_texts=2)
async def test_prompts_do_not_wait_behind_what_is_only_counted(mesh, monkeypatch):
    began, go_on = threading.Event(), threading.Event()
    encode = TextEncoder.encode

    def slow(self, text, **options):
        if text.startswith("count"):
            began.set()
            go_on.wait(20)
        return encode(self, text, **options)

    monkeypatch.setattr(TextEncoder, "encode", slow)
    counts = [Prepare(request_id=f"c{i}", texts=[f"count {i}, which takes long"], route=False) for i in range(3)]
    asks = [asyncio.ensure_future(ask(mesh, count)) for count in counts[:2]]
    await until(began.is_set)
    await until(lambda: mesh.tokenizer.stats()["mesh_tokenizer_long_texts"] == 2)
    assert await failure(mesh, counts[2]) == ("overloaded", None, True)
    prompts = ["a prompt that is long", *["x"] * 11]
    prepared = await ask(mesh, Prepare(request_id="r", texts=prompts))
    assert prepared.token_ids == [list(text.encode()) for text in prompts]
    assert not any(one.done() for one in asks)
    go_on.set()
    for count, answer in zip(counts[:2], await asyncio.gather(*asks), strict=True):
        assert answer.token_ids == [list(count.texts[0].encode())]


async def test_requests_of_a_dead_worker_are_told_where_they_go_on_sooner(mesh):
    for name in ("s0", "s1"):
        scheduler = mesh.systems[name].actor.ctx
        scheduler.announce(numerics="bits", weights="w")
        load = Load(num_running=0, num_waiting=0, num_free_pages=99, num_pages=99, prefill_tokens_per_s=1e4)
        scheduler.publish(LOAD_TOPIC, load)
    known = mesh.tokenizer.routing.schedulers
    await until(lambda: all(known[name].attributes.numerics and known[name].load for name in ("s0", "s1")))
    requests = [ChooseRoute(request_id=request_id, token_ids=PROMPT) for request_id in ("a", "b")]
    moves = await ask(mesh, ChooseMoves(holder="s0", returns_in_s=1.0, requests=requests))
    assert isinstance(moves, MovesChosen)
    assert {name: route.decode for name, route in moves.routes.items()} == {"a": "s1", "b": "s1"}
    mesh.tokenizer.on_members([], [], [])
    await mesh.start("w1", Peer(WORKER), group="s1")
    await until(lambda: mesh.tokenizer.ctx.members.get("w1") is not None)
    mesh.tokenizer.on_peer_down(Address("supervisor", 1), PeerDown(actor_id="w1", epoch=1))
    moves = await ask(mesh, ChooseMoves(holder="s0", returns_in_s=1.0, requests=requests))
    assert moves.routes == {}, "s1 has no worker either"


@pytest.mark.settings(inline_chars=10)
async def test_nobody_waits_for_the_answer(mesh):
    text = "some words " * 20_000
    tasks = [asyncio.ensure_future(ask(mesh, Prepare(request_id=f"r{i}", texts=[text]))) for i in range(3)]
    await until(lambda: mesh.tokenizer.stats()["mesh_tokenizer_long_texts"] == 3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: mesh.tokenizer.stats()["mesh_tokenizer_long_texts"] == 0)


async def test_routes_follow_caches_loads_and_members(mesh):
    hashes = chain_hashes(root_hash(), PROMPT, 16)
    run = PagesStored(group="s1", page_hashes=hashes, parent_hash=root_hash(), tokens=pack_tokens(PROMPT[:64]))
    s0, s1 = (mesh.systems[name].actor.ctx for name in ("s0", "s1"))
    s1.publish(KV_EVENTS_TOPIC, CacheEvents(events=[run]))
    await until(lambda: mesh.tokenizer.stats()["mesh_tokenizer_indexed_pages"] == 4)
    route = await ask(mesh, ChooseRoute(request_id="r", token_ids=PROMPT))
    assert (route.decode, route.prefill) == ("s1", "")
    s1.publish(LOAD_TOPIC, StopAt(attempts=[]))
    load = Load(num_running=50, num_waiting=9, num_free_pages=0, num_pages=9)
    s1.publish(LOAD_TOPIC, load)
    await until(lambda: mesh.tokenizer.routing.schedulers["s1"].load == load)
    assert (await ask(mesh, ChooseRoute(request_id="r", token_ids=PROMPT))).decode == "s0"
    s1.announce(numerics="x")
    await until(lambda: mesh.tokenizer.routing.schedulers["s1"].attributes.numerics == "x")
    later = ChooseRoute(request_id="r", token_ids=PROMPT, numerics="x")
    assert (await ask(mesh, later)).decode == "s1", "its output so far has the bits of that group"
    s0.announce("draining")
    await until(lambda: not mesh.tokenizer.routing.schedulers["s0"].ready)
    assert (await ask(mesh, ChooseRoute(request_id="r", token_ids=PROMPT))).decode == "s1"

    await mesh.kill("s1")
    await mesh.start("s1", Peer(SCHEDULER), group="s1")
    await until(lambda: mesh.tokenizer.stats()["mesh_tokenizer_indexed_pages"] == 0)
    await until(lambda: mesh.tokenizer.routing.schedulers["s1"].ready)
    assert (await ask(mesh, ChooseRoute(request_id="r", token_ids=PROMPT))).decode in ("s0", "s1")


@pytest.mark.settings(use_threads=False, use_processes=False, inline_chars=10)
async def test_on_the_loop_alone_as_in_the_simulation(mesh):
    text = "some words " * 10
    assert (await ask(mesh, Prepare(request_id="r", texts=[text]))).token_ids == [list(text.encode())]
    assert (await ask(mesh, chat(text))).token_ids == [list(text.encode())]
    assert mesh.tokenizer.stats()["mesh_tokenizer_templates_killed_total"] == 0


async def test_a_model_without_a_template(monkeypatch):
    spec = msgspec.structs.replace(resolve_model("echo"), chat_template=None)
    monkeypatch.setattr("nodes.tokenizer.actor.describe_model", lambda model: spec)
    async with mesh_with() as mesh:
        assert await failure(mesh, chat("x")) == ("template_error", "messages", False)
        assert (await ask(mesh, Prepare(request_id="r", texts=["x"]))).token_ids == [[120]]


async def test_a_chat_template_of_the_operators_own_takes_the_models_place(tmp_path):
    template = tmp_path / "loud.jinja"
    template.write_text("{{ messages[-1].content | upper }}!", encoding="utf-8")
    async with mesh_with(chat_template=str(template)) as mesh:
        assert (await ask(mesh, chat("hi"))).token_ids == [list(b"HI!")]


async def test_a_chat_template_that_cannot_be_read_ends_the_start(tmp_path):
    template = tmp_path / "not-text.jinja"
    template.write_bytes(b"\xff\xfe")
    with pytest.raises(ModelDamaged, match=r"not-text\.jinja cannot be read as text"):
        async with mesh_with(chat_template=str(template)):
            pytest.fail("it has started")


async def test_what_a_request_asks_of_its_draws_is_tried_out_first(mesh):
    [good] = asked([Grammar("regex", "a+", "regex")])
    [bad] = asked([Grammar("json", '{"uniqueItems":true}', "it", strict=True)])
    [part] = asked([Grammar("json", '{"uniqueItems":true}', "it")])
    with structlog.testing.capture_logs() as logs:
        for kind in ({"token_ids": [[1, 2]]}, {"texts": ["ab"]}):
            for checks in ([good], [part, good]):
                answer = await ask(mesh, Prepare(request_id="r", checks=checks, **kind))
                assert len(answer.token_ids) == 1
            code, param, _ = await failure(mesh, Prepare(request_id="r", checks=[good, bad], **kind))
            assert (code, param) == ("unsupported_schema", "it")
    assert [one["ignored"] for one in logs if "not enforced" in one["event"]] == ['Unimplemented keys: ["uniqueItems"]']
    assert (await ask(mesh, chat("hello", checks=[good]))).token_ids


@pytest.mark.settings(model="tiny")
async def test_a_template_is_described_and_how_prompts_end(mesh):
    told = await ask(mesh, DescribeTemplate())
    assert told.template == resolve_model("tiny").chat_template
    special = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert told.added_ids == {**special, "<tool_call>": 1022, "</tool_call>": 1023}
    assert told.shows_tools
    assert (await ask(mesh, chat("hello"))).prompt_tail.endswith("hello<|im_end|>\n<|im_start|>assistant\n")
    assert (await ask(mesh, Prepare(request_id="r", texts=["hello"]))).prompt_tail == ""
    assert len((await ask(mesh, chat("x" * 500))).prompt_tail) == PROMPT_TAIL_CHARS
    chatted, plain = await ask(mesh, chat("hello")), await ask(mesh, Prepare(request_id="r", texts=["hello"]))
    assert 0 < chatted.render_s <= chatted.elapsed_s
    assert plain.render_s == 0


async def test_a_template_that_shows_no_tools(mesh):
    assert not (await ask(mesh, DescribeTemplate())).shows_tools


@pytest.mark.settings(chat_template=str(Path(__file__).parent / "templates" / "qwen_like.jinja"))
async def test_a_template_that_shows_tools(mesh):
    told = await ask(mesh, DescribeTemplate())
    assert "<tool_call>" in told.template
    assert told.shows_tools


@pytest.mark.settings(model="tiny")
async def test_a_vocabulary_is_described_by_offsets_and_bytes(mesh):
    answer = await mesh.gateway.ctx.ask("tok", DescribeVocabulary(), timeout_s=20)
    spec = resolve_model("tiny")
    table = token_bytes(load_tokenizer(spec))
    offsets, data = map(bytes, answer.buffers)
    ends = struct.unpack(f"<{len(table) + 1}I", offsets)
    assert [data[begin:end] for begin, end in pairwise(ends)] == table
    assert answer.message.num_tokens == len(table)
    assert answer.message.end_token_ids == list(with_vocabulary(spec, vocabulary_facts(spec)).eos_token_ids)


async def test_the_tokenizer_is_described_by_its_file_and_what_is_in_force(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    file = model / "tokenizer_config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "model_max_length": 10**30, "of_its_own": [1]}))
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    async with mesh_with(str(model), context_length=64, chat_template=str(template)) as mesh:
        told = json.loads((await ask(mesh, DescribeTokenizer())).document)
        assert (told["of_its_own"], told["tokenizer_class"]) == ([1], said["tokenizer_class"])
        assert (told["model_max_length"], told["chat_template"]) == (64, template.read_text())
        assert told["eos_token"] == resolve_model("tiny").special_tokens["eos_token"]
        file.write_text('{"x": NaN}')
        told = json.loads((await ask(mesh, DescribeTokenizer())).document)
        assert (told["model_max_length"], told.get("x")) == (64, None)
        file.write_text("{")
        assert (await failure(mesh, DescribeTokenizer()))[0] == "model_damaged"
    async with mesh_with("echo", context_length=64) as mesh:
        told = json.loads((await ask(mesh, DescribeTokenizer())).document)
        assert (told["model_max_length"], told["tokenizer_class"]) == (64, "PreTrainedTokenizerFast")


async def test_pairs_are_prepared_as_the_tokenizer_joins_them(mesh):
    prepared = await ask(mesh, Prepare(request_id="r", texts=["ab", "c"], seconds=["d", "ef"]))
    assert (prepared.token_ids, prepared.second_from) == ([list(b"abd"), list(b"cef")], [0, 0])
    assert len(prepared.routes) == 2
    around = Prepare(request_id="r", texts=["ab"], seconds=["cdef"], after="g", add_special_tokens=False)
    cut = msgspec.structs.replace(around, truncate_to=5, truncate_end=True)
    assert [(await ask(mesh, one)).token_ids for one in (around, cut)] == [[list(b"abcdefg")], [list(b"abcdg")]]
    assert await failure(mesh, Prepare(request_id="r", texts=["a"], seconds=[])) == ("invalid_request", None, False)


@pytest.mark.settings(context_length=64, inline_chars=100)
async def test_prompts_of_vectors_are_for_the_gateway_to_measure(mesh):
    for fields in ({"texts": [""]}, {"texts": ["x" * 64, ""]}, {"texts": ["x"], "seconds": ["y" * 80]}):
        question = Prepare(request_id="r", asks=[VECTORS], **fields)
        prepared = await ask(mesh, question)
        assert sum(map(len, prepared.token_ids)) == sum(len(text) for texts in fields.values() for text in texts)
        assert len(prepared.routes) == len(prepared.token_ids)
    foreign = Prepare(request_id="r", asks=[VECTORS], token_ids=[[999_999]])
    assert (await failure(mesh, foreign))[0] == "invalid_token_id"
    # Texts that fit under no tokenization are not encoded, pairs neither; what is cut is.
    for fields in ({"texts": ["x" * 1000]}, {"texts": ["x" * 500], "seconds": ["y" * 500]}):
        long = Prepare(request_id="r", asks=[VECTORS], **fields)
        assert (await failure(mesh, long))[:2] == ("context_length_exceeded", "prompt")
        cut = msgspec.structs.replace(long, truncate_to=9, truncate_end=True)
        assert [len(ids) for ids in (await ask(mesh, cut)).token_ids] == [9]
