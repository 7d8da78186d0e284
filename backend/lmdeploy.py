"""The name under which programs import LMDeploy's pipeline and clients: all of it is in compat/lmdeploy."""

from compat.lmdeploy import *  # noqa: F403
