"""Port and NCCL settings; how fast the GPUs talk to each other is measured only when asked."""

from __future__ import annotations

import os

from backends.doctor.report import Asked, Check, Place, Question, judge
from backends.ports import port_free

PRIVILEGED = 1024
EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"


def port(place: Place, asked: Asked) -> Check:
    """Can a server listen there?"""
    number = asked.port
    holder = next((run for run in place.runs.live("server") if run.spec.port == number), None)
    if holder:
        return judge("network.port", f"our server {holder.id} has port {number}", "", port=number)
    if number < PRIVILEGED and os.geteuid() != 0:
        return judge(
            "network.port", f"port {number} is for root alone", "choose another --port", fail=True, port=number
        )
    if not port_free(number):
        remedy = f"stop what listens there (`ss -ltnp 'sport = :{number}'`), or choose another --port"
        return judge("network.port", f"port {number} is taken by another process", remedy, fail=True, port=number)
    ephemeral = (place.text(EPHEMERAL) or "").split()
    clash = len(ephemeral) == 2 and int(ephemeral[0]) <= number <= int(ephemeral[1])
    seen = f"port {number} is free"
    if clash:
        seen += f", but one that the kernel gives to anybody ({ephemeral[0]} to {ephemeral[1]})"
    return judge("network.port", seen, "choose a --port outside that range", warn=clash, port=number)


def nccl_settings(place: Place, asked: Asked) -> Check:
    """Settings of NCCL that every server started here inherits."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}
    if not found:
        return judge("network.nccl", "no NCCL_ variable is set where servers are started", "", variables=0)
    harmful = found.get("NCCL_PROTO", "").upper() == "LL" or found.get("NCCL_P2P_DISABLE") == "1"
    return judge(
        "network.nccl",
        "inherited: " + ", ".join(f"{name}={value}" for name, value in found.items()),
        "unset NCCL_PROTO=LL, which halves large messages, and NCCL_P2P_DISABLE=1 unless GPUs hang without it",
        warn=harmful,
        variables=len(found),
    )


QUESTIONS: dict[str, Question] = {"network.port": port, "network.nccl": nccl_settings}
