# shellcheck shell=bash
# Any Slurm cluster: nothing is loaded, Python is that of .venv or of the PATH. Copy this file to sites/<name>.sh for
# another cluster and choose it with SITE=<name>. What the user has set wins (`:=`).

# : "${MODULES:=cuda python}"     # module load, in this order
# : "${CONTAINER:=none}"          # shifter, podman-hpc, apptainer, pyxis or none
# : "${IMAGE:=}"                  # the container's image
# : "${CONTAINER_FLAGS:=}"        # further words for the container command
# : "${PYTHON:=}"                 # default: .venv/bin/python where it is, else python
# : "${DATA_DIR:=}"               # a folder with train/, valid/, test/ and stats/; default: what the config says
# : "${STAGE_TO:=$TMPDIR}"        # a folder of each node's own disk: train/ and valid/ are copied there first
# : "${LOG_DIR:=}"                # default: what the config says (./logs)
