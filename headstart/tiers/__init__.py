"""Tiers: blocks stored outside the pool, on disk and on other machines. No torch."""

from headstart.tiers.contents import Counts, ModelReport, VerifyReport, verify
from headstart.tiers.disk import DiskStore
from headstart.tiers.index import default_folder, make_folder
from headstart.tiers.remote import RemoteStore
from headstart.tiers.store import BlockStore, Faults, LoadedBlock, ModelRecord, Pause, StoredBlock
from headstart.tiers.transfers import (
    OBJECTS,
    Loader,
    LoadJob,
    ObjectStore,
    Saver,
    StateName,
    StateSearch,
)
from headstart.tiers.worker import GuardedStore, Job, StoreChain, Worker

__all__ = [
    "OBJECTS",
    "BlockStore",
    "Counts",
    "DiskStore",
    "Faults",
    "GuardedStore",
    "Job",
    "LoadJob",
    "LoadedBlock",
    "Loader",
    "ModelRecord",
    "ModelReport",
    "ObjectStore",
    "Pause",
    "RemoteStore",
    "Saver",
    "StateName",
    "StateSearch",
    "StoreChain",
    "StoredBlock",
    "Worker",
    "VerifyReport",
    "default_folder",
    "make_folder",
    "verify",
]
