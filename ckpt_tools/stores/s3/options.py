"""Options for reaching an S3 service, and the client of botocore that they make.

botocore's client signs, resolves credentials, regions and endpoints as every AWS tool does, and is what s3fs is built
on. Its threads share one pool of connections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import SimpleNamespace
from typing import Any

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import StoreError, UsageError
from ckpt_tools.stores.retry import RetryPolicy

MAX_CONNECTIONS = 64
"""Kept open to a service; more threads than that wait for each other."""

CONNECT_SECONDS, READ_SECONDS = 10, 60
"""S3 answers within a second, or not at all."""

INSTALL_COMMAND = "pip install 'ckpt-tools[s3]'"


@dataclass(frozen=True, slots=True)
class S3Options:
    """Options for reaching a service; missing ones come from the usual AWS environment and files."""

    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    profile: str | None = None
    endpoint_url: str | None = field(default=None, repr=False)
    region: str | None = None
    anon: bool = False
    addressing_style: str | None = None
    connect_timeout: float = CONNECT_SECONDS
    read_timeout: float = READ_SECONDS
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> S3Options:
        """Storage options of a user, checked. Raises UsageError."""
        names = [each.name for each in fields(cls) if each.name != "retry"]
        unknown_names = sorted(set(options) - {*names, "retries"})
        if unknown_names:
            raise UsageError(
                f"{format_option('storage_options', {unknown_names[0]: '...'})}: s3:// knows {', '.join(names)} and "
                f"retries"
            )
        try:
            parsed_options = {
                name: _PARSERS.get(name, str)(value) for name, value in options.items() if name != "retries"
            }
            policy = RetryPolicy(attempts=1 + int(options["retries"])) if "retries" in options else RetryPolicy()
        except ValueError as error:
            raise UsageError(f"{format_option('storage_options')} does not fit: {error}") from error
        return cls(**parsed_options, retry=policy)


def _parse_bool(value: object) -> bool:
    parsed_values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if str(value).lower() not in parsed_values:
        raise ValueError(f"anon is true or false, not {value!r}")
    return parsed_values[str(value).lower()]


_PARSERS: Mapping[str, Callable[[Any], Any]] = {"anon": _parse_bool, "connect_timeout": float, "read_timeout": float}


def credentials_hint() -> str:
    options_example = format_option("storage_options", {"key": "...", "secret": "..."})
    return f"check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or {options_example}"


@cache
def import_exceptions() -> tuple[Any, Any]:
    """The exceptions of botocore, those of its parsers with them, and of urllib3 below it. Raises UsageError."""
    try:
        from botocore import exceptions, parsers
        from urllib3 import exceptions as below
    except ImportError as error:
        raise UsageError(f"s3:// needs packages that are not installed: {INSTALL_COMMAND}") from error
    return SimpleNamespace(**vars(exceptions), ResponseParserError=parsers.ResponseParserError), below


@cache
def make_client(options: S3Options, process: int) -> Any:
    """A client of this process: connections must not be shared with one that was forked."""
    import botocore.session
    from botocore import UNSIGNED, exceptions
    from botocore.config import Config

    config = Config(
        signature_version=UNSIGNED if options.anon else None,
        max_pool_connections=MAX_CONNECTIONS,
        connect_timeout=options.connect_timeout,
        read_timeout=options.read_timeout,
        retries={"total_max_attempts": 1, "mode": "standard"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"payload_signing_enabled": False, "addressing_style": options.addressing_style},
    )
    try:
        session = botocore.session.Session(profile=options.profile)
        region = options.region or session.get_config_variable("region") or "us-east-1"
        client = session.create_client(
            "s3",
            region_name=region,
            endpoint_url=options.endpoint_url,
            aws_access_key_id=options.key,
            aws_secret_access_key=options.secret,
            aws_session_token=options.token,
            config=config,
        )
        # A request that asks whether to send its body waits for two answers: small ones are sent.
        client.meta.events.register_last("before-call.s3.PutObject", _drop_expectation)
        return client
    except (exceptions.BotoCoreError, ValueError) as error:
        raise StoreError(f"S3 cannot be reached as configured: {error}") from error


def _drop_expectation(params: Any, **_: Any) -> None:
    params["headers"].pop("Expect", None)
