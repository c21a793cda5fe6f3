#!/usr/bin/env bash
#SBATCH --job-name=fine-tune
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@300
# Fine-tune with one command.
#
#   ./launch.sh                                  the recipes and the configs, a line each
#   ./launch.sh RECIPE CONFIG [--flag value …]   train
#   ./launch.sh --tiny RECIPE CONFIG [--flag …]  rehearse on tiny stand-ins; needs no GPU
#   ./launch.sh --plan RECIPE [CONFIG] [--flag …]  will it fit, on which cards, how long; without GPU or weights
#   ./launch.sh --preview RECIPE [--flag …]      what the model will see: rows as packed, what trains, what is cut off
#   ./launch.sh --prepare RECIPE [--flag …]      all a run needs into the caches: afterwards it runs without internet
#   ./launch.sh --merge RUN [OUT]                an adapter or a sharded checkpoint becomes a plain model
#   ./launch.sh --report RUN…                    finished runs side by side: time, speed-up, memory, losses
#   ./launch.sh RECIPE --help                    what a recipe is and which numbers it sets
#   ./launch.sh --test [pytest arguments]        run the tests
#
# RECIPE and CONFIG are names, or paths to files that lie anywhere. The first call makes .venv and installs
# requirements.txt into it; PYTHON=/path/to/python uses that environment instead and installs nothing.
#
# Several machines:
#   sbatch --nodes 2 --gpus-per-node 4 launch.sh RECIPE CONFIG            SLURM; or `srun ./launch.sh …` in an allocation
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 ./launch.sh RECIPE CONFIG      on each, with its own NODE_RANK
set -euo pipefail

unset CDPATH
if [[ ${WORLD_SIZE:-1} != 1 && -z ${NNODES:-} ]]; then
  printf 'WORLD_SIZE=%s is not read here; several machines are told by NNODES, NODE_RANK and MASTER_ADDR.\n' "$WORLD_SIZE" >&2
fi
unset RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE # of another launcher; this one starts the processes itself
script=${BASH_SOURCE[0]}
if [[ ${script##*/} == slurm_script && -n ${SLURM_JOB_ID:-} ]]; then
  # SLURM runs a copy in its spool folder. It knows the original, with the arguments behind it.
  script=$(scontrol show job "$SLURM_JOB_ID" | sed -n '/^ *Command=/{s///p;q;}') || true
  script=${script%" $*"}
  [[ $script == /* ]] || script=$SLURM_SUBMIT_DIR/$script
fi
here=$(cd -- "$(dirname -- "$(readlink -f -- "$script")")" && pwd)
export PYTHONPATH="$here/recipes${PYTHONPATH:+:$PYTHONPATH}"

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

[[ -d $here/recipes/harness ]] || fail "$script is not launch.sh of a clone: submit the file itself, sbatch launch.sh RECIPE CONFIG"

# names FOLDER: the names of the recipes or configs in it
names() {
  local file
  for file in "$here/$1"/*.{py,yaml}; do
    [[ -f $file ]] || continue
    file=${file##*/}
    printf '%s\n' "${file%.*}"
  done
}

# list FOLDER: each file's name and what its first line says of it
list() {
  local name file line
  while IFS= read -r name; do
    for file in "$here/$1/$name".{py,yaml}; do
      [[ -f $file ]] || continue
      IFS= read -r line <"$file" || true
      line=${line#\"\"\"} line=${line#\# } line=${line%\"\"\"}
      printf '  %-20s %s\n' "$name" "$line"
    done
  done < <(names "$1")
}

# resolve FOLDER EXTENSION WORD KIND: the file that WORD names, or one line with the nearest name
resolve() {
  local file
  for file in "$here/$1/$3.$2" "$3"; do
    if [[ -f $file ]]; then
      printf '%s/%s\n' "$(cd -- "$(dirname -- "$file")" && pwd)" "${file##*/}"
      return
    fi
  done
  local -a known
  mapfile -t known < <(names "$1")
  local near all
  near=$(nearest "$3" "${known[@]}")
  all=$(printf ', %s' "${known[@]}")
  fail "no $4 is called '$3': did you mean $near? There are: ${all:2}"
}

nearest() {
  python3 -c 'import difflib, sys; print(difflib.get_close_matches(sys.argv[1], sys.argv[2:], 1, 0)[0])' "$@"
}

# Sets $python, after making .venv where it is not yet what requirements.txt says.
prepare_python() {
  if [[ -n ${PYTHON:-} ]]; then
    python=$(command -v -- "$PYTHON") || fail "PYTHON=$PYTHON is no program: give the path of a python"
    [[ $python == /* ]] || python=$PWD/$python
    return
  fi
  python="$here/.venv/bin/python"
  local done="$here/.venv/requirements.installed"
  cmp -s "$here/requirements.txt" "$done" && return
  command -v python3 >/dev/null || fail "python3 is missing: install Python 3.11"
  python3 -c 'import ensurepip, venv' 2>/dev/null ||
    fail "python3 cannot make a virtual environment: install python3-venv, or set PYTHON"
  if command -v flock >/dev/null; then
    exec 9>"$here/.venv.lock"
    flock 9
    if cmp -s "$here/requirements.txt" "$done"; then
      exec 9>&-
      return
    fi
  fi
  printf 'Installing requirements.txt into %s, once: 5.5 GB with the libraries of CUDA, some minutes.\n' "$here/.venv" >&2
  python3 -m venv "$here/.venv" >&2 || fail "python3 cannot make a virtual environment: install python3-venv, or set PYTHON"
  local -a install=("$python" -m pip install --disable-pip-version-check)
  if command -v uv >/dev/null; then install=(uv pip install --python "$python" --compile-bytecode); fi
  "${install[@]}" -r "$here/requirements.txt" >&2 ||
    fail "the installation did not finish: see above, then call the same command again to go on"
  cp -- "$here/requirements.txt" "$done"
  exec 9>&-
}

# call MODULE [argument …]: a module of the harness, in the Python of the project
call() {
  prepare_python
  # The folder a person stands in may hold a datasets.py; it must not be taken for the package.
  PYTHONSAFEPATH=1 exec "$python" -m "harness.$1" "${@:2}"
}

# run [--tiny] [--prepare | --preview | --plan] RECIPE [CONFIG] [--flag …]
run() {
  local -a options=() files
  local command='' module=start.launch
  while [[ ${1:-} =~ ^--(tiny|prepare|preview|plan)$ ]]; do
    if [[ $1 != --tiny ]]; then
      [[ -z $command ]] || fail "$command and $1 are two commands: call one after the other"
      command=$1
    fi
    options+=("$1")
    shift
  done
  (($#)) || fail "${options[*]} needs a RECIPE; ./launch.sh lists them"
  files=("$(resolve recipes py "$1" recipe)")
  if [[ -z $command ]]; then
    case ${2:---} in
      --help | -h) exec python3 -m harness.start.flags "${files[0]}" ;;
      --tiny) fail "--tiny comes first: ./launch.sh --tiny $1 ${3:-CONFIG}" ;;
      -*) fail "which config? ./launch.sh ${options[*]:+${options[*]} }$1 CONFIG, where CONFIG is one of: $(names accelerate_configs | paste -sd ' ')" ;;
    esac
  fi
  shift
  if [[ $command == --plan ]]; then
    ((${#options[@]} == 1)) || fail "--plan is of the full size: leave out --tiny"
    module=plan.command options=()
    if [[ ${1:--} == -* ]]; then files+=("$here"/accelerate_configs/*.yaml); fi
  fi
  if [[ ${1:--} != -* && $command != --pre* ]]; then
    files+=("$(resolve accelerate_configs yaml "$1" config)")
    shift
  fi
  call "$module" "${options[@]}" "${files[@]}" "$@"
}

case ${1:-} in
  "")
    printf './launch.sh RECIPE CONFIG [--flag value …]      or, without a GPU:  ./launch.sh --tiny RECIPE CONFIG\n'
    printf '\nRECIPE, from recipes/\n'
    list recipes
    printf '\nCONFIG, from accelerate_configs/\n'
    list accelerate_configs
    ;;
  --help | -h) sed -n '/^# Fine/,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" ;;
  --test)
    shift
    prepare_python
    cd -- "$here"
    # Two at once: while one test waits for a clock or for one process, another computes.
    exec "$python" -m pytest tests -n 2 --dist loadgroup --no-loadscope-reorder "$@"
    ;;
  --tiny | --prepare | --preview | --plan) run "$@" ;;
  --merge)
    shift
    (($# == 1 || $# == 2)) || fail "--merge takes the folder of a run, and where the model is to go: ./launch.sh --merge RUN [OUT]"
    call commands.merge "$@"
    ;;
  --report)
    shift
    [[ ${1:--} != -* ]] || fail "--report takes the folders of finished runs: ./launch.sh --report RUN…"
    call commands.report "$@"
    ;;
  -*) fail "unknown option $1: ./launch.sh --help lists them" ;;
  *) run "$@" ;;
esac
