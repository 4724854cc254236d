"""The variables that launchers set, and an environment without any."""

from __future__ import annotations

from collections.abc import Mapping

LAUNCHER_PREFIXES = ("SLURM_", "OMPI_", "PMI", "MPI_", "TORCHELASTIC_", "MASTER_", "GLOO_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
STEP = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "node[01-09]",
    "SLURM_STEP_NODELIST": "node[07-08]",
}
BATCH = {"SLURM_JOB_ID": "71", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "node[01-02]"}
BATCH_OF_NODES = {
    "SLURM_JOB_ID": "71",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-17@1",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k not in LAUNCHER_NAMES and not k.startswith(LAUNCHER_PREFIXES)}
