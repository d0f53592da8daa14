"""Variables that go to other hosts, and the secrets that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechtrain.files import holds_secret, is_secret
from speechtrain.launch.launcher import Job, forwarded_environment

NAMES = ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MYSQL_PWD", "GH_PAT", "SSH_PASSPHRASE", "PROXY_AUTH", "BEARER"]


HARMLESS = [
    "PATH",
    "PYTHONPATH",
    "PWD",
    "OLDPWD",
    "TOKENIZERS_PARALLELISM",
    "AUTHOR",
    "GITHUB_PATH",
    "HF_HOME",
]


def test_secrets_are_known_by_their_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*NAMES, *HARMLESS):
        monkeypatch.setenv(name, "hush")
    forwarded = forwarded_environment(Job(tmp_path / "config.yaml", tmp_path), ["*"])
    assert not set(NAMES) & set(forwarded)
    assert set(HARMLESS) <= set(forwarded)
    assert [is_secret(name) for name in ("tokenizer", "token")] == [False, True]


@pytest.mark.parametrize(
    ("text", "is_held"),
    [
        ("x:\n  token: abc\n", True),
        ('{"argv": ["x.api_key=abc"]}', True),
        ('{"argv": ["x=my_token=abc"]}', True),
        ("x" * 10**6, False),
        ("{'written': {'tracking/own': 'password: abc'}}", True),
        ("url: postgres://me:abc@host/db\n", True),
        ("token: ${oc.env:TOKEN}\n", False),
        ("token: null\n", False),
        ("token: '${ oc.env:TOKEN}'\n", False),
        ("tokenizer: letters\nenv_from_secrets: []\nurl: http://host:80/a@b\n", False),
    ],
    ids=range(10),
)
@pytest.mark.timeout(60)
def test_a_text_with_a_secret_is_recognised(text: str, is_held: bool) -> None:
    assert holds_secret(text) is is_held
