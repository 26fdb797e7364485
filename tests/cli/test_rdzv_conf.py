"""The keys of `--rdzv-conf`: values, warnings, errors."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_aio.spec.checks import UsageError
from elastic_aio.spec.rdzv_conf import parse_conf
from elastic_aio.spec.rendezvous import EngineSpec, RendezvousSpec
from elastic_aio.spec.tls import TlsSpec


@pytest.mark.parametrize(
    ("text", "backend", "settings"),
    [
        ("", "c10d", {}),
        (" ", "c10d", {}),
        ("join_timeout=1", "c10d", {"join_timeout": 1}),
        ("last_call_timeout=0", "c10d", {"last_call_timeout": 0}),
        ("scale_up_delay=0", "etcd", {"scale_up_delay": 0}),
        ("scale_up_limit=1", "redis", {"scale_up_limit": 1}),
        ("scale_up=checkpoint", "c10d", {"scale_up": "checkpoint"}),
        ("close_timeout=0", "c10d", {"close_timeout": 0}),
        ("heartbeat_timeout=2", "c10d", {"heartbeat_timeout": 2}),
        ("read_timeout=1", "c10d", {"read_timeout": 1}),
        ("store_grace=0", "c10d", {"store_grace": 0}),
        ("is_host=1,keep_workers=NO", "c10d", {"is_host": True, "keep_workers": False}),
        ("store_type=tcp", "tcp", {}),
        (" join_timeout = 5 , read_timeout= 6 ", "c10d", {"join_timeout": 5, "read_timeout": 6}),
        ("join_timeout=5,join_timeout=6", "c10d", {"join_timeout": 6}),
        ("", "static", {"join_timeout": 900, "read_timeout": 900}),
        ("timeout=60", "static", {"join_timeout": 60, "read_timeout": 60}),
        ("timeout=60,join_timeout=5", "static", {"join_timeout": 5, "read_timeout": 60}),
    ],
)
def test_keys_set_fields(text: str, backend: str, settings: dict[str, Any]) -> None:
    """Each key sets the field of its name to a value that `RendezvousSpec` accepts."""
    conf = parse_conf(text, backend)
    assert conf.settings == settings
    assert conf.warnings == ()
    RendezvousSpec(**conf.settings)


@pytest.mark.parametrize(
    ("text", "engine", "tls"),
    [
        (
            "user=me,key_prefix=/a,retention=60",
            {"user": "me", "key_prefix": "/a", "retention": 60},
            {},
        ),
        ("tls_ca=/ca,tls_cert=/c,tls_key=/k", {}, {"ca": "/ca", "cert": "/c", "key": "/k"}),
        ("protocol=http", {}, {}),
        ("protocol=http,ca_cert=/ca", {}, {}),
        (
            "protocol=https,ca_cert=/ca,ssl_cert=/c,ssl_cert_key=/k",
            {},
            {"ca": "/ca", "cert": "/c", "key": "/k"},
        ),
        ("cacert=/ca,cert=/c,key=/k", {}, {"ca": "/ca", "cert": "/c", "key": "/k"}),
        ("etcd_prefix=/p2p", {"key_prefix": "/p2p"}, {}),
    ],
)
@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_keys_of_etcd(text: str, engine: dict[str, Any], tls: dict[str, Any], backend: str) -> None:
    """Ours, and those of torchrun's two backends."""
    conf = parse_conf(text, backend)
    assert (conf.engine, conf.tls, conf.warnings) == (engine, tls, ())
    RendezvousSpec(backend=backend, engine=EngineSpec(**conf.engine))


@pytest.mark.parametrize("backend", ["redis", "valkey"])
def test_keys_of_redis(backend: str) -> None:
    conf = parse_conf("user=me,password_file=/p,sentinel=m,retention=60,tls_ca=/ca", backend)
    assert conf.engine == {"user": "me", "sentinel": "m", "retention": 60}
    assert (conf.tls, conf.password_file, conf.warnings) == ({"ca": "/ca"}, "/p", ())
    (warning,) = parse_conf("etcd_prefix=/a", backend).warnings
    assert "'etcd_prefix' is unknown" in warning
    conf = parse_conf("sentinel=m", "etcd")
    assert (conf.engine, len(conf.warnings)) == ({}, 1)


@pytest.mark.parametrize("yes", ["1", "true", "True", "t", "yes", "Y"])
@pytest.mark.parametrize("no", ["0", "false", "F", "no", "n"])
def test_words_for_yes_and_no(yes: str, no: str) -> None:
    """torch's words are accepted in upper and lower case."""
    conf = parse_conf(f"is_host={yes},keep_workers={no}", "c10d")
    assert conf.settings == {"is_host": True, "keep_workers": False}


def test_a_value_may_hold_an_equals_sign() -> None:
    """Only the first one separates; a plug-in gets all pairs as text."""
    conf = parse_conf("url=a=b,join_timeout=9", "mail")
    assert conf.pairs == {"url": "a=b", "join_timeout": "9"}
    assert conf.settings == {"join_timeout": 9}
    assert conf.warnings == ()


def test_token_file_is_a_path() -> None:
    """The file is not read here."""
    conf = parse_conf("token_file=/run/token", "c10d")
    assert (conf.token_file, conf.settings, conf.warnings) == ("/run/token", {}, ())


@pytest.mark.parametrize(
    ("text", "backend", "words"),
    [
        ("keep_alive_interval=5", "c10d", ["keep_alive_interval", "heartbeat_timeout sets"]),
        ("keep_alive_max_attempt=3", "static", ["keep_alive_max_attempt", "heartbeat_timeout"]),
        ("timeout=900", "c10d", ["timeout has no effect", "join_timeout"]),
        ("rank=1", "static", ["rank has no effect", "--node-rank"]),
        ("is_host=1", "static", ["is_host has no effect", "rank 0"]),
        ("is_host=1", "etcd", ["is_host has no effect", "etcd is the store"]),
        ("is_host=False", "etcd-v2", ["is_host has no effect"]),
        ("is_host=1", "redis", ["is_host has no effect", "redis is the store"]),
        ("join_timout=9", "c10d", ["'join_timout' is unknown", "; did you mean join_timeout?"]),
        ("protocol=https", "static", ["'protocol' is unknown"]),
    ],
)
def test_keys_without_effect_give_a_warning(text: str, backend: str, words: list[str]) -> None:
    """The warning names the key and its replacement."""
    conf = parse_conf(text, backend)
    (warning,) = conf.warnings
    assert warning.startswith("--rdzv-conf: ")
    assert all(word in warning for word in words)
    assert conf.settings == parse_conf("", backend).settings


@pytest.mark.parametrize(
    ("key", "backend", "hint"),
    [
        ("tokenfile", "c10d", "token_file"),
        ("token", "static", "token_file"),
        ("tls_crt", "c10d", "tls_cert"),
        ("tls_keyy", "etcd", "tls_key"),
        ("tls_cacert", "c10d", "tls_ca"),
        ("TLS-CA", "redis", "tls_ca"),
        ("cacert", "redis", "tls_ca"),
        ("certfile", "etcd", "tls_cert"),
        ("ssl_cert_key", "c10d", "tls_key"),
        ("tls_clientauth", "static", "tls_client_auth"),
        ("username", "etcd", "user"),
        ("password", "redis", "password_file"),
        ("password", "c10d", ""),
        ("tls_min_version", "c10d", ""),
        ("certificate", "etcd", ""),
    ],
)
def test_a_mistyped_key_of_the_security_is_an_error(key: str, backend: str, hint: str) -> None:
    """Without the key the store would be open.  The value may be a secret, and is not shown."""
    with pytest.raises(UsageError) as caught:
        parse_conf(f"join_timout=9,{key}=hunter2", backend)
    hint = f"; did you mean {hint}?" if hint else ""
    expected = f"--rdzv-conf: must have keys of the backend {backend!r}{hint} (got {key!r})"
    assert str(caught.value) == expected


@pytest.mark.parametrize("key", ["protocol", "key_prefix", "sentinel", "case", "host", "monkey"])
def test_other_unknown_keys_stay_warnings(key: str) -> None:
    assert len(parse_conf(f"{key}=x", "c10d").warnings) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("join_timeout", "must be KEY=VALUE,KEY=VALUE,... (got 'join_timeout'"),
        ("join_timeout=", "must be KEY=VALUE,KEY=VALUE,... (got 'join_timeout='"),
        ("=5", "must be KEY=VALUE,KEY=VALUE,... (got '=5'"),
        ("token_file='/a", 'must be KEY=VALUE,KEY=VALUE,... (got "token_file=\'/a"'),
        ('token_file="/a"b', "must be KEY=VALUE,KEY=VALUE,... (got 'token_file=\"/a\"b'"),
        ("join_timeout=5,", "must be KEY=VALUE,KEY=VALUE,... (got 'join_timeout=5,'"),
        ("join_timeout=0", "join_timeout: must be whole seconds from 1 to 999999999 (got '0'"),
        ("join_timeout=1.5", "join_timeout: must be whole seconds from 1 to 999999999 (got '1.5'"),
        ("join_timeout=-1", "join_timeout: must be whole seconds from 1 to 999999999 (got '-1'"),
        ("read_timeout=0", "read_timeout: must be whole seconds from 1 to 999999999 (got '0'"),
        ("heartbeat_timeout=1", "heartbeat_timeout: must be whole seconds from 2 to 999999999"),
        ("last_call_timeout=x", "last_call_timeout: must be whole seconds from 0 to 999999999"),
        ("close_timeout=1e3", "close_timeout: must be whole seconds from 0 to 999999999"),
        ("store_grace=" + "9" * 10, "store_grace: must be whole seconds from 0 to 999999999"),
        ("timeout=0", "timeout: must be whole seconds from 1 to 999999999 (got '0'"),
        ("keep_alive_interval=0", "keep_alive_interval: must be a whole number from 1 to"),
        ("keep_alive_max_attempt=x", "keep_alive_max_attempt: must be a whole number from 1 to"),
        ("is_host=perhaps", "is_host: must be true or false (got 'perhaps'"),
        ("keep_workers=2", "keep_workers: must be true or false (got '2'"),
        ("store_type=file", "store_type: must be 'tcp'; a file store is not supported (got"),
        ("store_type=redis", "store_type: must be 'tcp' (got 'redis'"),
        ("backend=c10d", "backend is set by --rdzv-backend"),
        ("endpoint=a:1", "endpoint is set by --rdzv-endpoint"),
        ("run_id=x", "run_id is set by --rdzv-id"),
        ("min_nodes=1", "min_nodes is set by --nnodes"),
        ("max_nodes=1", "max_nodes is set by --nnodes"),
        ("local_addr=a", "local_addr is set by --local-addr"),
    ],
)
@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_invalid_values(text: str, backend: str, message: str) -> None:
    """The error is one line with the key, the range and the value."""
    with pytest.raises(UsageError) as caught:
        parse_conf(text, backend)
    assert str(caught.value).startswith(f"--rdzv-conf: {message}")
    assert "\n" not in str(caught.value)


def test_the_keys_of_certificates_are_those_of_a_tls_spec() -> None:
    """A plug-in may give them another meaning."""
    text = "tls_cert=/c,tls_key=/k,tls_ca=/a,tls_client_auth=no,tls_server_name=store"
    conf = parse_conf(text, "c10d")
    assert conf.warnings == ()
    assert TlsSpec(**conf.tls) == TlsSpec(
        cert="/c", key="/k", ca="/a", client_auth=False, server_name="store"
    )
    assert parse_conf("tls_cert=x", "mail").tls == {}
    with pytest.raises(UsageError, match="tls_client_auth: must be true or false"):
        parse_conf("tls_client_auth=maybe", "c10d")


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("a='/x,y', join_timeout=5", {"a": "/x,y", "join_timeout": "5"}),
        ('a="k=v,w" ,b=c=d', {"a": "k=v,w", "b": "c=d"}),
        ('a="it\'s"', {"a": "it's"}),
        ("a=b'c,d=e'f", {"a": "b'c", "d": "e'f"}),
    ],
)
def test_quotes_keep_commas(text: str, pairs: dict[str, str]) -> None:
    """Around a whole value; elsewhere a quote is a character."""
    assert parse_conf(text, "c10d").pairs == pairs
