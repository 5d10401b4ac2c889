"""No name that a client can write leads out of the root."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.schema.consumer import SpecContext
from headgate.capture.schema.errors import ConfigError, ConsumerError, RequestError
from headgate.capture.schema.spec import Memo
from headgate.consumers.filesystem import FilesystemConsumer
from headgate.consumers.filesystem.storage.store import check_name, numbered, slug, stem_of
from tests.fakes.capturing import HOOKS, capturing, spec_context

texts = st.text(max_size=300) | st.text(alphabet="./\\~_-a", max_size=20)


@pytest.mark.parametrize("field", ["tag", "request_id"])
@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../a",
        "a/b",
        "/etc",
        "a\0b",
        "a\nb",
        "a\n",
        ".tmp",
        "_shards",
        "~a",
        "-a",
        "ü",
        "a" * 181,
        7,
        None,
        ["a"],
    ],
)
def test_a_bad_name_is_refused_by_the_name_of_its_field(field: str, name: object) -> None:
    with pytest.raises(RequestError) as caught:
        FilesystemConsumer.validate_client_spec({"hooks": HOOKS, field: name}, spec_context({"root": "captures"}))

    assert caught.value.field == f"capture.files.{field}"


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("run/42: a", r"' ', '/', ':' cannot be in it"),
        ("a\0\u00fc\ud800", r"'\\x00', '\\xfc', '\\ud800' cannot be in it"),
        ("_shards", "'_' cannot be the first"),
        ("..", "'.' cannot be the first"),
    ],
)
def test_the_characters_that_are_wrong_are_named(name: str, wrong: str) -> None:
    with pytest.raises(RequestError, match=rf"^tag: .* cannot be a file name as it is: {wrong}\. Names have") as caught:
        check_name(name, "tag")

    str(caught.value).encode()


def test_only_the_tags_that_the_operator_allows_are_taken() -> None:
    context = spec_context({"root": "captures", "tag": "a", "tags": ["a", "b"]})

    for wanted, tag in (({}, "a"), ({"tag": "b"}, "b")):
        assert FilesystemConsumer.validate_client_spec({"hooks": HOOKS, **wanted}, context).options["tag"] == tag
    with pytest.raises(RequestError, match=r"^capture\.files\.tag: tag 'c' is not allowed; allowed: a, b$"):
        FilesystemConsumer.validate_client_spec({"hooks": HOOKS, "tag": "c"}, context)


@pytest.mark.parametrize("params", [{"tags": ["b"]}, {"tags": []}, {"tag": "a", "tags": ["a", "../b"]}], ids=str)
def test_tags_are_checked_at_start_and_the_default_is_among_them(params: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"filesystem: tags?: "):
        FilesystemConsumer.check_params({"root": "captures", **params})


@pytest.mark.parametrize("name", ["a", "A.b_c-d", "0", "2026-11-20", "a..b", "a" * 180])
def test_a_plain_name_is_taken_as_it_is(name: str) -> None:
    assert check_name(name, "tag") == name == slug(name)


@given(texts)
def test_a_slug_is_one_visible_file_name(text: str) -> None:
    name = stem_of(numbered(slug(text), 9999), sample=(12, 13), stage=(7, 8)) + ".safetensors"

    assert os.path.basename(os.path.normpath(name)) == name
    assert not name.startswith((".", "_"))
    assert len(os.fsencode(name)) <= 255
    assert name.isascii()
    assert name.isprintable()


@given(st.lists(texts, unique=True, min_size=2, max_size=20))
def test_slugs_of_different_texts_differ(names: list[str]) -> None:
    assert len({slug(name) for name in names}) == len(names)


@given(texts)
def test_a_slug_is_never_a_name_that_a_client_could_have_written_for_something_else(text: str) -> None:
    made = slug(text)

    if made != text:
        with pytest.raises(RequestError):
            check_name(made, "request_id")


@pytest.mark.parametrize("layout", ["request", "raw", "shards"])
def test_nothing_is_written_through_a_symbolic_link(tmp_path: Path, layout: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    root = tmp_path / "root"
    with capturing(root, layout=layout) as files:
        (root / "escape").symlink_to(outside)

        with pytest.raises(ConsumerError, match="symbolic link"):
            files.feed.whole(files.request({"tag": "escape"}))
        files.feed.whole(files.request({"tag": "fine"}))

        assert files.temporary() == []
    assert list(outside.iterdir()) == []


def test_a_dangling_link_in_a_file_s_place_is_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with capturing(root) as files:
        (root / "default").mkdir()
        (root / "default" / "a.safetensors").symlink_to(tmp_path / "outside")

        with pytest.raises(ConsumerError, match="exists and is not overwritten"):
            files.feed.whole(files.request({"request_id": "a"}))
    assert not (tmp_path / "outside").exists()


def test_a_file_in_a_tag_s_place_is_an_error_of_that_request_alone(tmp_path: Path) -> None:
    with capturing(tmp_path) as files:
        (tmp_path / "taken").write_text("mine")

        with pytest.raises(ConsumerError, match="no folder"):
            files.feed.whole(files.request({"tag": "taken"}))
        payload = files.feed.whole(files.request())

    assert Path(payload["paths"][0]).exists()
    assert (tmp_path / "taken").read_text() == "mine"


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    with capturing(tmp_path / "root") as files:
        payload = files.feed.whole(files.request())

    assert payload["paths"] == [str(tmp_path / "disk" / "default" / "client-1.safetensors")]


def test_a_client_may_tell_where_the_messages_of_a_chat_lie() -> None:
    told = [{"role": "user", "start": 1, "stop": 4}, {"role": "assistant", "start": 4, "stop": 6}]

    found = FilesystemConsumer.validate_client_spec({"hooks": HOOKS, "messages": told}, spec_context({"root": "c"}))

    assert found.options["messages"] == told


@pytest.mark.parametrize(
    ("messages", "field", "what"),
    [
        ({"role": "user"}, "", "expected a list of at most 1024"),
        ([{"role": "user", "start": 0, "stop": 1}] * 1025, "", "got 1025 of them"),
        ([{"role": "user", "start": 0}], "[0]", "expected role, start and stop"),
        ([{"role": "user", "start": True, "stop": 2}], "[0]", "expected role, start and stop"),
        ([{"role": "user", "start": -1, "stop": 2}], "[0]", "that ascend"),
        ([{"role": "user", "start": 2, "stop": 2}], "[0]", "that ascend"),
        ([{"role": "user", "start": 2, "stop": 1 << 31}], "[0]", "that ascend"),
        ([{"role": "u" * 129, "start": 0, "stop": 1}], "[0]", "at most 128 characters"),
        ([{"role": "u", "start": 0, "stop": 3}, {"role": "u", "start": 2, "stop": 4}], "[1]", "that ascend"),
    ],
)
def test_messages_that_cannot_lie_so_are_refused(messages: object, field: str, what: str) -> None:
    with pytest.raises(RequestError, match=what) as caught:
        FilesystemConsumer.validate_client_spec({"hooks": HOOKS, "messages": messages}, spec_context({"root": "c"}))

    assert caught.value.field == f"capture.files.messages{field}"


def test_numbers_that_an_llm_gives_its_requests_name_other_files_in_another_run() -> None:
    def name(context: SpecContext, **more: str) -> str:
        options = FilesystemConsumer.validate_client_spec({"hooks": HOOKS, **more}, context).options
        assert options["request_id"] == more.get("request_id", context.client_request_id)
        return str(options["name"])

    first, second = (spec_context({"root": "c"}, "0") for _ in range(2))

    assert re.fullmatch(r"0~\d{8}-\d{6}-[0-9a-f]{4}", name(first))
    assert name(first) == name(first)
    assert name(replace(first, client_request_id="1")).partition("~")[2] == name(first).partition("~")[2]
    assert name(first) != name(replace(first, lasting=Memo())) != name(second)
    assert name(replace(first, client_request_id="cmpl-1")) == "cmpl-1"
    assert name(first, request_id="7") == "7"


@pytest.mark.parametrize(
    ("params", "options", "expected"),
    [
        ({}, {"request_id": "a"}, ["default/a.safetensors"]),
        ({}, {"request_id": "a", "layout": "raw", "tag": "t"}, ["t/a"]),
        ({}, {"request_id": "a", "layout": "shards"}, []),
        ({}, {}, []),
        ({"if_exists": "number"}, {"request_id": "a"}, []),
    ],
)
def test_a_request_must_have_the_paths_of_its_chosen_name(
    tmp_path: Path, params: dict[str, str], options: dict[str, str], expected: list[str]
) -> None:
    context = spec_context({"root": str(tmp_path), **params})
    spec = FilesystemConsumer.validate_client_spec({"hooks": HOOKS, **options}, context)

    assert FilesystemConsumer.own_names(spec, context, 1) == [str(tmp_path / path) for path in expected] or not expected
    if expected:
        (tmp_path / expected[0]).parent.mkdir()
        (tmp_path / expected[0]).touch()
        with pytest.raises(RequestError, match=r"^capture\.files\.request_id: .* exists and is not overwritten"):
            FilesystemConsumer.own_names(spec, context, 1)
