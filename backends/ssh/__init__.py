"""Hosts over SSH: `SshHost(ssh_config.resolve(ALIAS))`. Nothing outside this folder knows paramiko."""

import logging

from backends.ssh.host import SshHost
from backends.ssh.questions import Ask, Question, remembering

__all__ = ["Ask", "Question", "SshHost", "remembering"]

# Where nothing else takes it, Python prints paramiko's log on the terminal.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False
