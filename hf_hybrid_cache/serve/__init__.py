"""A server of one process that answers clients of OpenAI's API, and reads no document twice."""
