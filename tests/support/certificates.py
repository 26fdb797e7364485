"""Certificates for the tests, made by the `openssl` command."""

from __future__ import annotations

import functools
import itertools
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from elastic_aio.spec.tls import TlsSpec

__all__ = ["Authority", "can_make_certificates"]


def can_make_certificates() -> bool:
    """Tell whether the `openssl` command is installed."""
    return shutil.which("openssl") is not None


@dataclass(frozen=True)
class Authority:
    """A certificate authority, whose files are in a directory."""

    directory: Path
    name: str = "ca"

    @functools.cached_property
    def ca(self) -> Path:
        """The file with its certificate."""
        path = self.directory / f"{self.name}.pem"
        self._openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", self._key, "-out", path, "-subj", f"/CN={self.name}", "-days", "2",
            "-addext", "keyUsage=critical,keyCertSign",
        )  # fmt: skip
        return path

    def issue(
        self,
        names: str = "DNS:localhost,IP:127.0.0.1",
        *,
        usage: str = "serverAuth,clientAuth",
        is_expired: bool = False,
        passphrase: str = "",
    ) -> TlsSpec:
        """Return the settings of a side with a new certificate for `names`."""
        number = next(_numbers)
        cert = self.directory / f"{self.name}-{number}.pem"
        key, request, options = (cert.with_suffix(suffix) for suffix in (".key", ".csr", ".cnf"))
        options.write_text(f"subjectAltName={names}\nextendedKeyUsage={usage}\n")
        protection = ["-passout", f"pass:{passphrase}"] if passphrase else ["-nodes"]
        self._openssl(
            "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
            *protection, "-keyout", key, "-out", request, "-subj", f"/CN=node{number}",
        )  # fmt: skip
        self._openssl(
            "x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._key, "-out", cert,
            "-set_serial", number, "-extfile", options, "-days", -1 if is_expired else 2,
        )  # fmt: skip
        return TlsSpec(cert=cert, key=key, ca=self.ca)

    @property
    def _key(self) -> Path:
        return self.directory / f"{self.name}.key"

    @staticmethod
    def _openssl(*words: object) -> None:
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


_numbers = itertools.count(1)
