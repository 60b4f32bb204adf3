"""What a log says of prompts and answers."""

from nodes.redaction import PromptRedactor


def test_ids_are_renamed_alike_in_every_field_of_a_failure() -> None:
    redact = PromptRedactor()
    assert redact("prompt_ids", [70, 80, 70]) == [0, 1, 0]
    assert redact("logit_bias", {80: -1.5, 90: 2.0}) == {1: -1.5, 2: 2.0}
    assert redact("token_id", 90) == 2
    assert redact("output_ids", (80, -1)) == [1, -1], "what is no id yet stays"
    assert redact("stop_token_ids", None) is None
    assert PromptRedactor()("token_id", 90) == 0, "the next failure begins anew"


def test_texts_and_keys_are_hidden_and_all_else_is_not() -> None:
    redact = PromptRedactor()
    assert redact("stop", ["one", "three"]) == ["xxx", "xxxxx"]
    assert redact("text", None) is None
    assert [redact("extra_key", key) for key in ("", "salt", "other", "salt")] == ["", "key-1", "key-2", "key-1"]
    assert (redact("request_id", "r"), redact("logit_bias", {})) == ("r", {})
