"""A rule, read from its document: a gate with a name and ``applies_to``; and the rules that a request names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from headgate.capture.schema.errors import ConfigError, RequestError, shown
from headgate.steering.gates.layout import COLUMNS_PER_GATE, layout_of
from headgate.steering.gates.rule import FIELD, AppliesTo, Rule, fields_of_rule
from headgate.steering.requests.gate_fields import check_keys, read_gates
from headgate.steering.requests.request_fields import RULES
from headgate.steering.vectors.phase_vectors import Steerable, check_name

RULE_FIELDS = ("applies_to", "when", "then", "strength", "scope")
"""The fields of a rule's document beside its ``name``."""

_MAX_NAMED = 1024
_ANY = 64
"""Gates that one list may have where the columns of rules are the limit."""


def read_rule(name: object, document: Mapping[Any, Any], steerable: Steerable) -> Rule:
    """Read a rule.

    Args:
        name: Name of the rule.
        document: Its fields: `RULE_FIELDS`.
        steerable: The model and its limits.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    if not steerable.max_rules:
        raise RequestError(
            "name", "rules are off on this server; the operator sets --max-steering-rules and --steering-op-sites"
        )
    name = check_name(name, "name", "a rule")
    for key in document:
        if key not in RULE_FIELDS:
            named = key if isinstance(key, str) else shown(key)
            raise RequestError(named, f"unknown key; a rule has name, {', '.join(RULE_FIELDS)}")
    applies_to = _applies_to(document.get("applies_to"))
    _check_supported(document)
    gate = {key: document[key] for key in RULE_FIELDS[1:] if key in document}
    with fields_of_rule():
        (read,) = read_gates([{"name": name, **gate}], replace(steerable, max_gates=_ANY), FIELD)
    count, limit = layout_of([read]).num_columns, COLUMNS_PER_GATE * steerable.max_rules
    if count > limit:
        raise RequestError(
            "when",
            f"takes {count} numbers for each row, but all rules together have {limit}: {COLUMNS_PER_GATE} for each of "
            f"{steerable.max_rules}; the operator sets --max-steering-rules",
        )
    return Rule(gate=read, applies_to=applies_to)


def read_rules_document(document: object, steerable: Steerable) -> Rule:
    """Read one rule of a file: an object with its ``name`` and `RULE_FIELDS`.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    if not isinstance(document, Mapping):
        raise RequestError("rule", f"expected an object with name, {', '.join(RULE_FIELDS)}; got {shown(document)}")
    fields = {key: value for key, value in document.items() if key != "name"}
    if document.get("name") is None:
        raise RequestError("name", "is missing")
    return read_rule(document["name"], fields, steerable)


def read_selection(value: object) -> tuple[str, ...] | None:
    """Read the rules that a request names; None if it does not select among rules.

    Raises:
        RequestError: If they are no list of names, each once.
    """
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) > _MAX_NAMED:
        raise RequestError(RULES, f"expected a list of at most {_MAX_NAMED} names of rules, got {shown(value)}")
    return tuple(dict.fromkeys(check_name(name, f"{RULES}[{index}]", "a rule") for index, name in enumerate(value)))


def _applies_to(value: object) -> AppliesTo:
    known = [each.value for each in AppliesTo]
    if not isinstance(value, str) or value not in known:
        told = "is missing" if value is None else f"got {shown(value)}"
        raise RequestError("applies_to", f"{told}; expected one of {', '.join(known)}")
    return AppliesTo(value)


def _check_supported(document: Mapping[Any, Any]) -> None:
    if document.get("scope") == "rest_of_conversation":
        raise RequestError(
            "scope", "rules do not follow conversations; expected this_token, next_token or rest_of_request"
        )
    then = document.get("then")
    if isinstance(then, Mapping):
        if then.get("attenuate") is not None:
            raise RequestError("then.attenuate", "is for gates of requests: a rule has no static steering of its own")
        check_keys(then, ("module", "scale", "vectors", "ops", "features"), "then", "the effect of a rule")


def load_rules(path: Path, steerable: Steerable) -> tuple[Rule, ...]:
    """Read a file of rules.

    Raises:
        ConfigError: Naming the file, and the rule and field that is wrong.
    """
    try:
        documents = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"steering.rules_file (--steering-rules): {path}: cannot be read: {error}") from error
    if not isinstance(documents, list):
        raise ConfigError(
            f"steering.rules_file (--steering-rules): {path}: expected a list of rules, got {shown(documents)}"
        )
    rules: dict[str, Rule] = {}
    for index, document in enumerate(documents):
        try:
            rule = read_rules_document(document, steerable)
        except RequestError as error:
            raise ConfigError(f"steering.rules_file (--steering-rules): {path}: [{index}].{error}") from error
        if rule.name in rules:
            raise ConfigError(
                f"steering.rules_file (--steering-rules): {path}: [{index}].name: {rule.name!r} is the name of an "
                "earlier rule, too"
            )
        rules[rule.name] = rule
    return tuple(rules.values())
