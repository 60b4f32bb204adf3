"""Between gateway and tokenizer: token ids and routes; and the load that schedulers publish for it."""

from typing import Final

from mesh.wire.message import Message
from nodes.request import Asked

PROMPT_TAIL_CHARS: Final = 256
"""More than any template's beginning of an answer: gpt-oss's, the longest known, has 51."""


class Prepare(Message, frozen=True):
    """Ask a tokenizer for token ids and a route. Exactly one of `chat`, `texts`, `token_ids` is given.

    `chat` is one JSON document: the list of messages as the client sent it. Each element of `texts` or `token_ids` is
    one prompt. `add_special_tokens` applies to texts only: a chat template writes its own.

    Errors, all but the last three the client's fault: `template_error`, `unsupported_content`, `empty_prompt`,
    `invalid_token_id`, `context_length_exceeded`, `invalid_request`, `unsupported_ask`, `invalid_value`,
    `unsupported_schema`, `no_capacity`, `memory_released`, `overloaded`.
    With `route` a prompt has to leave room for an output token; without, it may have any length.
    `asks` are the names of what the request asks of its draws: only groups that can do all of them are chosen
    (`unsupported_ask` if there is none, `no_capacity` while one that could is away). `words` are texts whose ids an ask
    needs, each encoded by itself, without special tokens. `checks` are those asks whose values have to be tried out
    before they are served. With `late_system_as_user` system messages after the first turn are said by the user where
    the template would not show them in their place; without, such a chat is an error. `chat_special_tokens`: the
    tokenizer adds its own to a chat, too, beside the template's. Of a prompt with more than `truncate_to` tokens (0:
    any number) only the last so many are served, with `truncate_end` the first; those that the tokenizer added to a
    text are kept, and `invalid_value` is the answer where they leave no room for a token of it.

    Where `asks` has `VECTORS`, only ids are checked: gateways know which input of a call is empty or too long. With
    `seconds`, as many as there are texts, each of them makes a pair with its text, as the tokenizer's post-processor
    joins them; cut, the longer of the two loses tokens first. Without `add_special_tokens` the ids of text, second and
    `after` follow each other, and seconds alone are cut, to one token at least.
    """

    request_id: str
    chat: bytes | None = None
    tools: bytes | None = None
    chat_template_kwargs: bytes | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    texts: list[str] | None = None
    token_ids: list[list[int]] | None = None
    add_special_tokens: bool = True
    extra_key: str = ""
    route: bool = True
    excluded: list[str] = []
    asks: list[str] = []
    words: list[str] = []
    checks: list[Asked] = []
    late_system_as_user: bool = False
    chat_special_tokens: bool = False
    truncate_to: int = 0
    truncate_end: bool = False
    seconds: list[str] | None = None
    after: str = ""


class Route(Message, frozen=True):
    """Where a request goes. `prefill` is empty if the decode scheduler is to do the prefill itself."""

    decode: str
    prefill: str = ""
    detokenizer: str = ""


class Prepared(Message, frozen=True):
    """Token ids and a route for each prompt (no routes if none were requested), and ids for each of the `words`.

    `elapsed_s`: how long it took, `render_s` of it until a chat's template was rendered. `prompt_tail`: how the text
    of a chat ends, which may open or close a model's reasoning: its last `PROMPT_TAIL_CHARS`; of other prompts nothing.
    `second_from`, of each pair: where its tokens of type 1 begin, which it has up to its end; 0: it has none.
    """

    token_ids: list[list[int]]
    routes: list[Route] = []
    elapsed_s: float = 0.0
    words: list[list[int]] = []
    prompt_tail: str = ""
    second_from: list[int] = []
    render_s: float = 0.0


class ChooseRoute(Message, frozen=True):
    """Ask for the route of a later attempt: its ids are known; `excluded` names actors where it just failed.

    `numerics` and `weights` are those (`SchedulerAttributes`) under which the request's first output was computed:
    output computed under equal ones has the same bits. Empty: no output yet, or not known. `asks` as in `Prepare`.
    """

    request_id: str
    token_ids: list[int]
    extra_key: str = ""
    excluded: list[str] = []
    numerics: str = ""
    asks: list[str] = []
    weights: str = ""


class ChooseMoves(Message, frozen=True):
    """Ask for each of these requests, which are at scheduler `holder`, whether another group goes on with it sooner.

    The holder's worker is dead, and back in about `returns_in_s`. Answer: `MovesChosen`. Requests of one holder are
    asked for together, those that wait in its queue included, and each counts for the next: not all find room at once.
    """

    holder: str
    returns_in_s: float
    requests: list[ChooseRoute]


class MovesChosen(Message, frozen=True):
    """Answer to `ChooseMoves`: new routes by request id. Requests that are not named stay.

    Only groups that compute the same bits as the holder, have a worker and need less than `returns_in_s` for what they
    do not have cached.
    """

    routes: dict[str, Route]


class Detokenize(Message, frozen=True):
    """Ask a tokenizer for the text of token ids (the `/detokenize` route)."""

    token_ids: list[int]
    skip_special_tokens: bool = False


class Detokenized(Message, frozen=True):
    """Answer to `Detokenize`."""

    text: str


class DescribeVocabulary(Message, frozen=True):
    """Ask a tokenizer for the bytes of every token, which a gateway names tokens by."""


class VocabularyIs(Message, frozen=True):
    """Answer to `DescribeVocabulary`: which tokens end an answer, and two buffers.

    The first holds little-endian uint32 offsets, one more than `num_tokens`; token `i` is in the second, from offset
    `i` to offset `i + 1`. Special tokens are their text; ids that the tokenizer does not have are empty.
    """

    num_tokens: int
    end_token_ids: list[int] = []


class DescribeTemplate(Message, frozen=True):
    """Ask a tokenizer for its chat template, by which a gateway knows how the model writes reasoning and calls."""


class TemplateIs(Message, frozen=True):
    """Answer to `DescribeTemplate`: the template's text, empty if there is none; and by text the ids of all tokens that
    were added to the vocabulary: marks are among them, which are no part of a text if the tokenizer calls them special,
    unless a request says so (`RequestSpec.shown_ids`), and which no other tokens stand for.

    `shows_tools`: it renders tools that a request offers.
    """

    template: str
    added_ids: dict[str, int] = {}
    shows_tools: bool = False


class DescribeTokenizer(Message, frozen=True):
    """Ask a tokenizer for its configuration (the `/tokenizer_info` route). Error: `model_damaged`."""


class TokenizerIs(Message, frozen=True):
    """Answer to `DescribeTokenizer`: a JSON object like `tokenizer_config.json`, with what is in force."""

    document: bytes


class Load(Message, frozen=True):
    """What a scheduler publishes on topic `load` when it changes (by default at most ten times a second).

    `prefill_tokens_per_s`: how many tokens of prompts its worker computes in a second, of late; 0: not known.
    """

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    num_waiting_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
