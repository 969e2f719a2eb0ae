"""Contract tests that a third party subclasses for its own backend or policy.

They need the ``test`` extra (pytest, hypothesis), so each is imported by its own name:
``from tieredmoe.testing.contracts.backend import BackendContract``.
"""
