"""Where keys come from, what is refused, and that no message shows one."""

from pathlib import Path

import pytest
import yaml

from serve_app.config.errors import ConfigError
from serve_app.config.files import AppArgs, check_file
from serve_app.config.http import HttpSettings
from serve_app.config.keys import Access, KeyRing, read_keys

ALICE = "alice-1234567890-abcdef"
BOB = "bob-1234567890-abcdef=="
ROOT = "root-1234567890-abcdef"


def written(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def refused(*args: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read_keys(*args)  # type: ignore[arg-type]
    told = str(caught.value)
    assert not any(key in told for key in (ALICE, BOB, ROOT))
    return told


def test_without_a_source_everything_is_open() -> None:
    ring = read_keys(None, None, {})
    assert ring == KeyRing()
    assert not any(ring.guards(access) for access in Access)


def test_file_and_environment_add_up(tmp_path: Path) -> None:
    users = written(tmp_path / "users", f"# who\n\nalice:{ALICE}\n {BOB} \n")
    ring = read_keys(users, None, {"SLEEPSERVE_ADMIN_KEYS": f"ops: {ROOT},"})
    found = [ring.find(token) for token in (ALICE, BOB, ROOT)]
    assert [(key.name, key.access) for key in found if key] == [
        ("alice", Access.INFERENCE),
        (f"{users}:4", Access.INFERENCE),
        ("ops", Access.ADMIN),
    ]
    assert [ring.find(token) for token in (ALICE[:-1], ALICE + "x", "", "schlüssel")] == [None] * 4
    assert not any(key in repr(ring) for key in (ALICE, BOB, ROOT))


def test_what_is_guarded() -> None:
    users = read_keys(None, None, {"SLEEPSERVE_API_KEYS": ALICE})
    assert [users.guards(access) for access in Access] == [False, True, True]
    # One who keeps operators' routes to themselves may leave inference to everybody.
    admins = read_keys(None, None, {"SLEEPSERVE_ADMIN_KEYS": ROOT})
    assert [admins.guards(access) for access in Access] == [False, False, True]


@pytest.mark.parametrize(
    ("mode", "fine"), [(0o600, True), (0o440, True), (0o604, False), (0o620, False)]
)
def test_file_is_refused_when_others_may_read_it(tmp_path: Path, mode: int, fine: bool) -> None:
    path = written(tmp_path / "keys", ALICE, mode)
    if fine:
        assert read_keys(path, None, {}).find(ALICE)
    else:
        assert refused(path, None, {}).endswith(f"(mode {mode:o}); chmod 600 {path}")


def test_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none"
    expected = f"http.admin_keys_file: {path} cannot be read: No such file or directory"
    assert refused(None, str(path), {}) == expected


@pytest.mark.parametrize("text", ["", "# nobody\n\n"])
def test_no_key_is_no_open_server(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "keys", text)
    assert "has no key" in refused(path, None, {})
    assert "$SLEEPSERVE_API_KEYS has no key" in refused(None, None, {"SLEEPSERVE_API_KEYS": ""})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("short", ":1: a key has 16 characters or more"),
        (f"{ALICE} {BOB}", ":1: a key has 16 characters or more"),
        (f"all of us:{ALICE}", ":1: a name has letters"),
        (f":{ALICE}", ":1: a name has letters"),
        (f"a:b:{ALICE}", ":1: a name has letters"),
    ],
)
def test_line_that_is_no_key(tmp_path: Path, line: str, told: str) -> None:
    path = written(tmp_path / "keys", line)
    assert path + told in refused(path, None, {})


def test_key_for_both_is_refused() -> None:
    told = refused(
        None, None, {"SLEEPSERVE_API_KEYS": f"a:{ALICE}", "SLEEPSERVE_ADMIN_KEYS": f"b:{ALICE}"}
    )
    assert told == "a: the same key is b for operators; give them one of their own"


# --- files that change ---


def test_files_are_read_again_when_they_change(tmp_path: Path) -> None:
    users = written(tmp_path / "users", f"alice:{ALICE}")
    ring = read_keys(users, None, {"SLEEPSERVE_ADMIN_KEYS": ROOT})
    assert ring.current() is ring
    written(tmp_path / "users", f"bob:{BOB}")
    later = ring.current()
    assert [bool(later.find(token)) for token in (ALICE, BOB, ROOT)] == [False, True, True]
    assert later.current() is later


def test_file_that_is_replaced_by_another_of_its_size_is_seen(tmp_path: Path) -> None:
    """As Kubernetes does with a secret: a link leads to another folder."""
    for folder, key in (("old", ALICE), ("new", ALICE[::-1])):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder / "users", key)
    link = tmp_path / "now"
    link.symlink_to(tmp_path / "old")
    ring = read_keys(str(link / "users"), None, {})
    link.unlink()
    link.symlink_to(tmp_path / "new")
    later = ring.current()
    assert not later.find(ALICE)
    assert later.find(ALICE[::-1])


@pytest.mark.parametrize(
    ("text", "mode", "told"),
    [
        ("", 0o600, "has no key"),
        ("short", 0o600, "16 characters"),
        (BOB, 0o644, "chmod 600"),
        (ROOT, 0o600, "the same key is"),
        (None, 0, "cannot be read"),
    ],
)
def test_change_that_is_a_mistake_is_refused(
    tmp_path: Path, text: str | None, mode: int, told: str
) -> None:
    path = tmp_path / "users"
    ring = read_keys(written(path, ALICE), None, {"SLEEPSERVE_ADMIN_KEYS": ROOT})
    if text is None:
        path.unlink()
    else:
        written(path, text, mode)
    with pytest.raises(ConfigError, match=told):
        ring.current()
    written(path, BOB)
    assert ring.current().find(BOB)


# --- YAML ---


@pytest.mark.parametrize("value", [f"alice:{ALICE}", ALICE, "sk-abc", f"Bearer {BOB}", "0f" * 32])
@pytest.mark.parametrize("key", ["api_keys_file", "admin_keys_file"])
def test_key_in_place_of_a_path_is_refused_and_not_shown(key: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AppArgs.model_validate({"models": ["configs/demo.yaml"], "http": {key: value}})
    assert f"http.{key}: looks like a key" in str(caught.value)
    assert value not in str(caught.value)


@pytest.mark.parametrize(
    "path", ["keys", "/run/secrets/inference-keys-2026", "~/sleepserve/keys.txt"]
)
def test_path_is_taken(path: str) -> None:
    assert HttpSettings(api_keys_file=path).api_keys_file == path


@pytest.mark.parametrize("key", ["api_keys", "admin_key"])
def test_keys_in_yaml_are_refused(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AppArgs.model_validate({"models": ["configs/demo.yaml"], "http": {key: [ALICE]}})
    assert f"http.{key}: no keys in YAML; write keys into a file" in str(caught.value)
    assert ALICE not in str(caught.value)


@pytest.fixture
def serve_config(project: Path, tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A serve_config.yaml of its own project, with the tiny model."""
    config = yaml.safe_load((project / "serve_config.yaml").read_text())
    model = yaml.safe_load((project / "configs" / "tiny_cpu.yaml").read_text())
    model["source"]["id"] = str(tiny_checkpoint)
    for application in config["applications"]:
        application["args"] = {"models": [model]}
    file = tmp_path / "serve_config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def changed(file: Path, application: str, **changes: object) -> None:
    config = yaml.safe_load(file.read_text())
    (found,) = (each for each in config["applications"] if each["name"] == application)
    for key, value in changes.items():
        found[key] = found.get(key, {}) | value
    file.write_text(yaml.safe_dump(config))


def test_check_reads_key_files_beside_the_yaml(serve_config: Path) -> None:
    changed(serve_config, "llm", args={"http": {"api_keys_file": "keys"}})
    with pytest.raises(ConfigError, match=r"llm\.args\.http\.api_keys_file: .* cannot be read"):
        check_file(serve_config)
    written(serve_config.parent / "keys", ALICE)
    assert [model.model_id for model in check_file(serve_config).models] == ["tiny"]


def test_check_finds_keys_in_runtime_env(serve_config: Path) -> None:
    changed(serve_config, "llm", runtime_env={"env_vars": {"SLEEPSERVE_ADMIN_KEYS": ROOT}})
    with pytest.raises(ConfigError) as caught:
        check_file(serve_config)
    at = "applications.1.runtime_env.env_vars.SLEEPSERVE_ADMIN_KEYS"
    assert f"{at}: no keys in YAML" in str(caught.value)
    assert ROOT not in str(caught.value)
