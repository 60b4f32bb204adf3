"""Whatever is lost, repeated or late on the way, the gateway ends with the text of the tokens, once."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mesh.address import Address
from mesh.runtime.effects import Tell, Told
from nodes.bundled.byte_tokenizer import byte_tokenizer_json
from nodes.detokenizer.config import DetokenizerLimits
from nodes.detokenizer.core import DetokenizerCore, SchedulerLost
from nodes.detokenizer.incremental import DecoderFactory
from nodes.protocol import StreamFinish, StreamOpen, TokenBatch
from nodes.request import StopRules

DECODERS = DecoderFactory(Tokenizer.from_str(byte_tokenizer_json()))
D = Address("decode-0", 1)


class Gateway:
    """Takes deltas contiguously, drops what it has, as the request's log does."""

    def __init__(self):
        self.token_ids = []
        self.text = ""
        self.finish = None

    def take(self, delta):
        end = delta.position + len(delta.token_ids)
        is_new = end > len(self.token_ids) or (delta.finish_reason and self.finish is None)
        if delta.position > len(self.token_ids) or not is_new:
            return
        assert delta.text_offset <= len(self.text), "text has a hole where tokens have none"
        repeated = self.text[delta.text_offset :]
        assert delta.text.startswith(repeated), "a repeat differs"
        self.text += delta.text[len(repeated) :]
        self.token_ids += delta.token_ids[len(self.token_ids) - delta.position :]
        self.finish = delta.finish_reason


class Scheduler:
    """Sends a fixed output from any position, opening the stream again where asked to."""

    def __init__(self, token_ids, stop, reason):
        self.token_ids, self.stop, self.reason = token_ids, stop, reason

    def send(self, start, end, reopen_at=None):
        opens, finishes = [], []
        if reopen_at is not None:
            start = min(start, reopen_at)
            opens = [StreamOpen(1, "r", 0, "gw", self.stop, [], self.token_ids[:reopen_at])]
        if end == len(self.token_ids):
            finishes = [StreamFinish(1, end, self.reason)]
        ids = self.token_ids[start:end]
        columns = ([1], [start], [len(ids)]) if ids else ([], [], [])
        return TokenBatch(
            streams=columns[0], positions=columns[1], counts=columns[2], token_ids=ids, opens=opens, finishes=finishes
        )


OUTPUTS = st.lists(st.sampled_from([*"ab. é🙂".encode(), 0xFF, 257]), min_size=1, max_size=25)
RULES = st.builds(
    StopRules, st.just(99), stop=st.lists(st.sampled_from(["a.", "b", ". ", "🙂a"]), max_size=2),
    min_tokens=st.integers(0, 4), include_stop=st.booleans(),
)  # fmt: skip
STEP = st.tuples(st.sampled_from(["step", "lost", "text_lost", "again", "reopen", "cut_off"]), st.integers(0, 24))


def deliver(core, batch, gateway, now, lost=False):
    for command in core.handle(Told(D, batch), now):
        if isinstance(command, Tell) and not lost:
            for delta in command.message.deltas:
                gateway.take(delta)


@given(OUTPUTS, RULES, st.sampled_from(["stop", "length"]), st.lists(STEP, max_size=30))
def test_text_arrives_whole_and_once(token_ids, rules, reason, steps):
    scheduler = Scheduler(token_ids, rules, reason)
    quiet = Gateway()
    deliver(DetokenizerCore(DECODERS, DetokenizerLimits()), scheduler.send(0, len(token_ids), 0), quiet, 0)

    core, gateway, sent = DetokenizerCore(DECODERS, DetokenizerLimits()), Gateway(), 0
    for now, (kind, number) in enumerate(steps):
        at = min(number, len(token_ids))
        if kind == "reopen":
            deliver(core, scheduler.send(at, sent, min(at, sent)), gateway, now)
        elif kind == "cut_off":
            core.handle(SchedulerLost(D), now)
        elif kind == "again":
            deliver(core, scheduler.send(min(at, sent), sent), gateway, now)
        elif sent < len(token_ids):
            batch = scheduler.send(sent, sent + 1, 0 if sent == 0 else None)
            sent += 1
            if kind != "lost":
                deliver(core, batch, gateway, now, lost=kind == "text_lost")
        assert quiet.text.startswith(gateway.text)
        assert quiet.token_ids[: len(gateway.token_ids)] == gateway.token_ids

    have = len(gateway.token_ids)
    deliver(core, scheduler.send(have, len(token_ids), have), gateway, 1000)
    assert (gateway.text, gateway.token_ids, gateway.finish) == (quiet.text, quiet.token_ids, quiet.finish)
    whole = DECODERS._tokenizer.decode(token_ids[:-1] if reason == "stop" else token_ids)
    if not any(stop in whole for stop in rules.stop):
        assert quiet.text == whole
