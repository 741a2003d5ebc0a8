"""The older place of `sonde.PolicyLog`, for one more release."""

from sonde.deprecation import warn_deprecated
from sonde.policy.log import PolicyLog as PolicyJournal

__all__ = ["PolicyJournal"]

warn_deprecated("sonde.probes.policy_journal", "sonde.PolicyLog")
