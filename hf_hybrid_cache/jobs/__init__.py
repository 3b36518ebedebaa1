"""Calls in processes of their own: on this machine, or on the machines of a cluster."""

from .executors import EXECUTORS, JobFailedError, Jobs, JobsError, job_parameters

__all__ = ["EXECUTORS", "JobFailedError", "Jobs", "JobsError", "job_parameters"]
