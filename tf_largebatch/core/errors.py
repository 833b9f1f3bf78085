"""Typed errors. Each is also the builtin that callers already catch."""


class LargeBatchError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigurationError(LargeBatchError, ValueError):
    """A setting is missing, malformed, or contradicts another one."""


class TopologyError(ConfigurationError):
    """The description of the cluster (`TF_CONFIG`, or SLURM's variables) cannot be used."""


class MismatchError(LargeBatchError, ValueError):
    """Workers disagree on options, versions or collectives; the message shows both sides."""


class UnsupportedVersionError(LargeBatchError, ImportError):
    """An installed dependency lies outside the range this package was tested with."""


class ProgramOrderError(LargeBatchError, RuntimeError):
    """Something ran too early or too late, as a TensorFlow op before the strategy was made."""


class PeerTimeoutError(LargeBatchError, TimeoutError):
    """A worker did not answer in time; the message names it and its address."""


class DataError(LargeBatchError, ValueError):
    """A data source, or a row of it, cannot be used."""


class StateWriteError(LargeBatchError, OSError):
    """A training state cannot be written; `errno` says why, as for a full disk."""
