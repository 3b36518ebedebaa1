"""What is raised where several processes run one model."""


class LostProcessError(RuntimeError):
    """Another process of the group has ended, or does not answer; the message names its rank."""


class OutOfStepError(RuntimeError):
    """The processes of the group do not compute the same; the message says where they differ."""
