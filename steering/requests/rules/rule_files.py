"""Files of rules, as ``--steering-rules`` names them: a list of rules in YAML or JSON."""

from __future__ import annotations

from pathlib import Path

import yaml  # type: ignore[import-untyped]

from headgate.capture.schema.errors import ConfigError, RequestError, shown
from headgate.steering.gates.rule import Rule
from headgate.steering.requests.rules.rule_fields import read_rules_document
from headgate.steering.vectors.phase_vectors import Steerable


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
