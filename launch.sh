#!/usr/bin/env bash
#SBATCH --job-name=fine-tune
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@300
# Fine-tune with one command.
#
#   ./launch.sh                                    lists the recipes and the configs
#   ./launch.sh RECIPE CONFIG [--flag value …]     trains
#   ./launch.sh RECIPE [--flag value …]            trains with the config that it chooses for the GPUs of this machine
#   ./launch.sh RECIPE --help                      what a recipe is and what it sets
#   ./launch.sh --tiny RECIPE CONFIG [--flag …]    rehearses with a tiny model and dataset; needs no GPU
#   ./launch.sh --plan RECIPE [CONFIG] [--flag …]  will it fit, on which cards, how long; needs no GPU and no weights
#   ./launch.sh --preview [--tiny] RECIPE [--flag …]  the rows as the model will see them, which tokens count in the loss, rewards
#   ./launch.sh --prepare [--tiny] RECIPE [--flag …]  downloads everything a run needs; afterwards it trains without internet
#   ./launch.sh --merge RUN [OUT]                  merges an adapter into its base model, or a sharded checkpoint into one model
#   ./launch.sh --verify RUN [MODEL]               compares what was trained with what is saved, merged or quantized
#   ./launch.sh --chat RUN [--system TEXT] [--image FILE]  chats with the model of a finished run, merged or not
#   ./launch.sh --report RUN…                      compares finished runs with each other
#   ./launch.sh --COMMAND --help                   the arguments of a command
#   ./launch.sh --install                          installs requirements.txt into .venv, as the first call of any command does
#   ./launch.sh --test RECIPE [CONFIG] [--flag …]  the smoke test of one recipe, rehearsed with these flags
#   ./launch.sh --test [pytest arguments]          all tests
#   ./launch.sh --test --cuda_build                the tests of what only PyTorch's CUDA build does; without a GPU
#
# --plan RECIPE --for "2x3090,64GB" chooses the config and the micro-batch for a machine. --card NAME=GB,TFLOPS,GB/s plans for
# a GPU that --plan does not know.
# RECIPE and CONFIG are names, or paths of files anywhere. --json makes --plan, --preview, --report and --verify print JSON.
# --debug, anywhere in a command, shows the traceback of an error. PYTHON=/path/to/python uses that environment instead of .venv and
# installs nothing. TORCH_INDEX=https://download.pytorch.org/whl/cu126 installs PyTorch for another version of CUDA.
#
# Several machines:
#   sbatch --nodes 2 --gpus-per-node 4 launch.sh RECIPE CONFIG            SLURM; or `srun ./launch.sh …` in an allocation
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 ./launch.sh RECIPE CONFIG      on each machine, with its own NODE_RANK
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # as in `sh launch.sh`
set -euo pipefail
if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  printf 'error: bash is %s, but launch.sh needs 4.4 or newer: on macOS, brew install bash\n' "$BASH_VERSION" >&2
  exit 2
fi

of_recipe='--tiny|--preview|--prepare|--plan' # all commands: of a RECIPE
of_folder='--merge|--chat|--verify|--report'  # and of a run or a model
unset CDPATH
if [[ ${WORLD_SIZE:-1} != 1 && -z ${NNODES:-} ]]; then
  printf 'WORLD_SIZE=%s is ignored: several machines are set by NNODES, NODE_RANK and MASTER_ADDR.\n' "$WORLD_SIZE" >&2
fi
unset RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE # of another launcher; this one starts the processes itself
script=${BASH_SOURCE[0]}
if [[ ${script##*/} == slurm_script && -n ${SLURM_JOB_ID:-} ]]; then
  # SLURM runs a copy in its spool folder. `scontrol` has the path of the original, with its arguments.
  script=$(scontrol show job "$SLURM_JOB_ID" | sed -n '/^ *Command=/{s///p;q;}') || true
  script=${script%" $*"}
  [[ $script == /* ]] || script=$SLURM_SUBMIT_DIR/$script
fi
here=$(cd -- "$(dirname -- "$(readlink -f -- "$script")")" && pwd)
encoding=${PYTHONIOENCODING:-}
export PYTHONIOENCODING="${encoding%%:*}:backslashreplace" # a terminal that is not UTF-8 must not end a run
# Texts and names of files are UTF-8 here, also if the locale is ASCII. transformers reads its docstrings, which -OO removes.
export PYTHONUTF8=1
unset PYTHONOPTIMIZE
# Files of the working directory, such as ast.py or datasets.py, must not run instead of modules: Python 3.11 and newer read
# PYTHONSAFEPATH, and an empty entry of PYTHONPATH is the working directory.
export PYTHONSAFEPATH=1
PYTHONPATH=$here/recipes:${PYTHONPATH:-}:
while [[ $PYTHONPATH == *::* ]]; do PYTHONPATH=${PYTHONPATH//::/:}; done
export PYTHONPATH=${PYTHONPATH%:}
# GPUs of different kinds have the same numbers in CUDA, which sorts them by speed, as in nvidia-smi.
export CUDA_DEVICE_ORDER=${CUDA_DEVICE_ORDER:-PCI_BUS_ID}

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

[[ -d $here/recipes/harness ]] || fail "$script is not in a clone of the project: submit the file itself, sbatch launch.sh RECIPE CONFIG"

# names FOLDER: the names of the recipes or configs in it
names() {
  local file
  for file in "$here/$1"/*.{py,yaml}; do
    [[ -f $file ]] || continue
    file=${file##*/}
    printf '%s\n' "${file%.*}"
  done
}

# list FOLDER: the name of each file, and its first line
list() {
  local name file line
  while IFS= read -r name; do
    for file in "$here/$1/$name".{py,yaml}; do
      [[ -f $file ]] || continue
      IFS= read -r line <"$file" || true
      [[ $line == '"""'* || $line == '#'* ]] || line='(no docstring)'
      line=${line#\"\"\"} line=${line#\# } line=${line%\"\"\"}
      printf '  %-20s %s\n' "$name" "$line"
    done
  done < <(names "$1")
}

# resolve FOLDER EXTENSION WORD KIND: the path of the file that WORD names
resolve() {
  local file
  for file in "$here/$1/$3.$2" "$3"; do
    if [[ -f $file ]]; then
      printf '%s/%s\n' "$(cd -- "$(dirname -- "$file")" && pwd)" "${file##*/}"
      return
    fi
  done
  local other=accelerate_configs/$3.yaml
  [[ $1 == recipes ]] || other=recipes/$3.py
  [[ ! -f $here/$other ]] || fail "$3 is $other, but a $4 is expected here: write RECIPE first, then CONFIG"
  local -a known
  mapfile -t known < <(names "$1")
  local near all
  near=$(nearest 0.4 "$3" "${known[@]}")
  all=$(printf ', %s' "${known[@]}")
  fail "unknown $4: $3.${near:+ Did you mean $near?} There are: ${all:2}"
}

# nearest CUTOFF WORD KNOWN…: the known word that is most like WORD, nothing if none is similar enough (0 to 1)
nearest() {
  python3 -I -c 'import difflib, sys; print(*difflib.get_close_matches(sys.argv[2], sys.argv[3:], 1, float(sys.argv[1])))' "$@"
}

is_new_enough() { "$1" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# Prints the Python to make .venv with. The tests ran with 3.11.
find_python() {
  local name
  for name in python3.11 python3.12 python3.13 python3; do
    if "$name" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      printf '%s\n' "$name"
      return
    fi
  done
  fail "no Python 3.11, 3.12 or 3.13 with venv found (python3 is $(python3 --version 2>&1 | tail -n 1)): install one, on Debian with its package python3-venv, or set PYTHON"
}

# PyPI's PyTorch 2.13 is built with CUDA 13.0. By NVIDIA's compatibility table, CUDA 13 needs driver 580 and CUDA 12 driver 525.
check_driver() {
  local driver
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || return 0 # no GPU
  [[ ! $driver =~ ^[0-9]+ ]] || ((BASH_REMATCH[0] >= 580)) ||
    fail "the NVIDIA driver is ${driver%%$'\n'*}, but PyTorch with CUDA 13.0 needs 580 or newer: update it, or install PyTorch with CUDA 12.6, which needs 525 or newer: TORCH_INDEX=https://download.pytorch.org/whl/cu126 ./launch.sh …"
}

# Sets $python, after installing requirements.txt into .venv unless that was done.
prepare_python() {
  if [[ -n ${PYTHON:-} ]]; then
    python=$(command -v -- "$PYTHON") || fail "PYTHON: program not found: $PYTHON. Give the path of a python"
    [[ $python == /* ]] || python=$PWD/$python
    is_new_enough "$python" || fail "PYTHON: $python is $("$python" --version 2>&1 | tail -n 1), but Python 3.11 or newer is needed"
    local missing
    missing=$(missing_packages)
    [[ -z $missing ]] || fail "PYTHON: $python lacks $missing: run $python -m pip install -r $here/requirements.txt, or leave out PYTHON"
    return
  fi
  python="$here/.venv/bin/python"
  is_installed && return
  if command -v flock >/dev/null; then
    exec 9>"$here/.venv.lock"
    flock 9
    if is_installed; then
      exec 9>&-
      return
    fi
  fi
  install_requirements
  exec 9>&-
}

# Prints the packages that a run needs and $python does not have.
missing_packages() {
  "$python" -c '
from importlib.util import find_spec
names = ("torch", "transformers", "trl", "accelerate", "peft", "datasets")
print(*[name for name in names if not find_spec(name)], sep=", ")'
}

# The index of PyTorch: TORCH_INDEX, or the one that .venv was made with. "" is PyPI.
torch_index() { printf '%s' "${TORCH_INDEX:-$(cat -- "$here/.venv/torch_index" 2>/dev/null)}"; }

# What .venv/installed.txt has after an installation
wanted() { cat -- "$here/requirements.txt" "$here/constraints.txt" && torch_index; }

is_installed() { wanted | cmp -s - "$here/.venv/installed.txt"; }

# Installs requirements.txt into .venv. An environment with another index or a Python that is too old is made again.
install_requirements() {
  local base index
  index=$(torch_index)
  [[ -n $index ]] || check_driver
  base=$(find_python)
  local -a clear=() index_option=() pip=("$python" -m pip install --disable-pip-version-check --no-compile)
  if [[ -x $python ]] && { ! is_new_enough "$python" || [[ $index != "$(TORCH_INDEX='' torch_index)" ]]; }; then
    clear=(--clear)
  fi
  printf 'Installing requirements.txt into %s: 5.5 GB with the CUDA libraries, once, some minutes.\n' "$here/.venv" >&2
  "$base" -m venv "${clear[@]}" "$here/.venv" >&2 || fail "$base cannot make a virtual environment, see above: set PYTHON to another one"
  printf '%s' "$index" >"$here/.venv/torch_index"
  local uv=uv
  # uv needs less time, even if it is installed first (benchmarks/README.md). It does not read pip's settings, such as an index.
  if ! command -v uv >/dev/null && [[ -z $("${pip[@]:0:3}" config list) ]]; then
    uv="$here/.venv/bin/uv"
    "${pip[@]}" --quiet uv==0.13.9 >&2 || fail "uv cannot be installed, see above: run the same command again"
  fi
  if command -v "$uv" >/dev/null; then
    # Without this strategy, uv takes all versions of a package from the first index that has it; pip takes the newest of all.
    pip=("$uv" pip install --python "$python" --index-strategy unsafe-best-match)
  fi
  [[ -z $index ]] || index_option=(--extra-index-url "$index")
  "${pip[@]}" -r "$here/requirements.txt" -c "$here/constraints.txt" "${index_option[@]}" >&2 ||
    fail "the installation did not finish, see above: run the same command again to continue it"
  make_torchvision_importable
  # Imports what a run needs, a quarter of all modules, and so compiles it once. The processes of a run would each do that.
  env -u PYTHONDONTWRITEBYTECODE "$python" -c \
    'import harness.start.recipes' >/dev/null 2>&1 || true
  wanted >"$here/.venv/installed.txt"
}

# Without it, no program in .venv can import transformers where torchvision is of another build than torch. The file says why.
make_torchvision_importable() {
  local site
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  rm -f -- "$site"/torchvision_operators.*
  "$python" -c 'import torchvision' 2>/dev/null && return
  cp -- "$here/recipes/harness/torchvision_operators.py" "$site"
  printf 'import torchvision_operators; torchvision_operators.install()\n' >"$site/torchvision_operators.pth"
}

# call MODULE [argument …]: runs a module in recipes/
call() {
  prepare_python
  exec "$python" -m "$1" "${@:2}"
}

# show_flags FILE: prints the help of a recipe; its docstring if nothing is installed yet
show_flags() {
  if [[ -z ${PYTHON:-} ]] && ! is_installed; then
    exec python3 -I -c 'import ast, sys; print(ast.get_docstring(ast.parse(open(sys.argv[1], encoding="utf-8").read())))' "$1"
  fi
  prepare_python
  PYTHONPATH="${1%/*}:${PYTHONPATH:-}" exec "$python" "$1" --help
}

show_help() { sed -n '/^# Fine/,/^set /{s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"; }

# check_words COMMAND [word …]: exits if a command cannot be called with these words, or if they ask for its help. Installs nothing.
check_words() {
  local parsers=harness.commands.parsers
  [[ $1 != --plan ]] || parsers=planner.arguments
  local python=${PYTHON:-python3}
  [[ -n ${PYTHON:-} || ! -x $here/.venv/bin/python ]] || python=$here/.venv/bin/python
  is_new_enough "$python" || return 0 # `call` finds another one, or says what is wrong with PYTHON, and parses again
  "$python" -m "$parsers" "${1#--}" "${@:2}" || exit
  [[ ! " ${*:2} " =~ " "(--help|-h)" " ]] || exit 0
}

# run [--tiny] [--prepare | --preview | --plan] RECIPE [CONFIG] [--flag …]
run() {
  local -a tiny=() files
  local command=''
  while [[ ${1:-} =~ ^($of_recipe)$ ]]; do
    if [[ $1 == --tiny ]]; then
      tiny=(--tiny)
    else
      [[ -z $command ]] || fail "$command and $1 are two commands: run one after the other"
      command=$1
    fi
    shift
  done
  (($#)) || fail "${command:-${tiny[*]}} needs a RECIPE; ./launch.sh lists them"
  [[ ! ${1:-} =~ ^(--help|-h)$ || -n $command ]] || {
    show_help
    return
  }
  [[ -z $command ]] || check_words "$command" "$@"
  [[ $1 != -* ]] || fail "write RECIPE before its flags: ./launch.sh ${tiny[*]}${tiny:+${command:+ }}$command RECIPE $1 …"
  files=("$(resolve recipes py "$1" recipe)")
  if [[ -z $command ]]; then
    [[ ! " ${*:2} " =~ " "(--help|-h)" " ]] || show_flags "${files[0]}"
    case ${2:---} in
      --tiny) fail "--tiny comes first: ./launch.sh --tiny $1 ${3:-CONFIG}" ;;
      -*) call planner.command --start "${tiny[@]}" "${files[@]}" "$here"/accelerate_configs/*.yaml "${@:2}" ;;
    esac
  fi
  [[ ! $command =~ ^--(preview|prepare)$ || ${2:--} == -* ]] || fail "$command takes no CONFIG: leave out $2, or write a flag before it"
  shift
  case $command in
    --preview) call harness.commands.preview "${tiny[@]}" "${files[@]}" "$@" ;;
    --prepare) call harness.commands.prepare "${tiny[@]}" "${files[@]}" "$@" ;;
    --plan)
      ((${#tiny[@]} == 0)) || fail "--plan is about the full size: leave out --tiny"
      [[ ${1:--} != -* ]] || call planner.command "${files[@]}" "$here"/accelerate_configs/*.yaml "$@"
      files+=("$(resolve accelerate_configs yaml "$1" config)")
      call planner.command "${files[@]}" "${@:2}"
      ;;
    *)
      files+=("$(resolve accelerate_configs yaml "$1" config)")
      call harness.start.launch "${tiny[@]}" "${files[@]}" "${@:2}"
      ;;
  esac
}

# Sets $python to .venv-cuda: PyTorch's CUDA build, Liger's kernels, and all other packages of the $python before.
prepare_cuda_build() {
  local folder=$here/.venv-cuda requirements=$here/tests/cuda_build/requirements.txt site
  local -a pip=("$folder/bin/python" -m pip install --disable-pip-version-check --no-compile)
  local -a files=("$here/requirements.txt" "$here/constraints.txt" "$requirements")
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  if ! cat -- "${files[@]}" <(echo "$site") | cmp -s - "$folder/installed.txt"; then
    "$python" -m venv --clear "$folder"
    if ! "$python" -c 'import sys, torch; sys.exit(not torch.version.cuda)'; then
      printf 'Installing PyTorch with CUDA into %s: 4.5 GB, once, some minutes.\n' "$folder" >&2
      # === excludes 2.13.0+cpu, which pip would prefer wherever it finds it.
      "${pip[@]}" "$(sed -n 's/^torch==/torch===/p' "$here/requirements.txt")" -c "$here/constraints.txt" >&2
    fi
    "${pip[@]}" --no-deps -r "$requirements" >&2
    echo "$site" >"$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/others.pth"
    cat -- "${files[@]}" <(echo "$site") >"$folder/installed.txt"
  fi
  python=$folder/bin/python
  export CUDA_VISIBLE_DEVICES='' TEST_ALL=1 # nothing runs on a GPU, if there is one
}

# run_tests [--cuda_build] [RECIPE [CONFIG]] [pytest argument …] [--flag of the recipe …]
run_tests() {
  local -a selection=(tests)
  local has_cuda_build=''
  if [[ ${1:-} == --cuda_build ]]; then
    has_cuda_build=yes
    # What forks, changes a library, or asks for CUDA or Triton; and a rehearsal of every kind.
    selection=(tests/cuda_build tests/compat/test_changes.py tests/model/test_{attention,quantized}.py tests/planner/test_command.py)
    selection+=(tests/start/test_{arguments,checks,launch,plain_launchers,processes}.py)
    local pair
    for pair in qwen2_chat-1x3090 qwen2_fineweb_edu-{1x3090_offload,4gpu_ddp} gpt2_xl_wikitext-3xt4_full_shard \
      qwen3_dpo-4gpu_full_shard qwen3_30b_a3b_lora-4gpu_full_shard qwen3_8b_qlora-1x3090 llama31_70b_qlora-2x3090_qlora; do
      selection+=("tests/recipes/test_smoke.py::test_pair_trains_and_saves_a_model[$pair]")
    done
    shift
  fi
  if [[ ${1:--} != -* ]]; then
    selection=(tests/recipes/test_smoke.py::test_pair_trains_and_saves_a_model -v --recipe "$(resolve recipes py "$1" recipe)")
    shift
    if [[ ${1:--} != -* ]]; then
      selection+=(--config "$(resolve accelerate_configs yaml "$1" config)")
      shift
    fi
    while (($#)) && [[ $1 != --* ]]; do # what begins with one dash is pytest's, such as -x
      selection+=("$1")
      shift
    done
    selection+=("--rehearsal_folder=$PWD" "${@/#/--rehearsal_flag=}")
    set --
  fi
  prepare_python
  [[ -z $has_cuda_build ]] || prepare_cuda_build
  cd -- "$here"
  unset PYTHONDONTWRITEBYTECODE # containers often set it, and hundreds of processes would compile the same modules
  unset PYTHONSAFEPATH          # programs of the tests import files next to them
  # Three workers, for two cores or more: while a test waits, for a time limit or for a lost node, others compute. The tests of
  # `-m unit` are done before the workers would have started.
  [[ " $* " == *" -m unit "* ]] || selection+=(-n 3 --dist loadgroup --no-loadscope-reorder)
  exec "$python" -P -m pytest "${selection[@]}" "$@"
}

# --debug can be anywhere, but after --test it is a flag of pytest, and with one of two values it is one of TrainingArguments.
words=()
while (($#)); do
  if [[ $1 == --debug && ${words[0]:-} != --test && ! ${2:-} =~ ^(underflow_overflow|tpu_metrics_debug)$ ]]; then
    export HARNESS_DEBUG=1
  else
    words+=("$1")
  fi
  shift
done
set -- "${words[@]}"
case ${1:-} in
  "")
    printf './launch.sh RECIPE CONFIG [--flag value …]      or, without a GPU:  ./launch.sh --tiny RECIPE CONFIG\n'
    printf '\nRECIPE, from recipes/\n'
    list recipes
    printf '\nCONFIG, from accelerate_configs/\n'
    list accelerate_configs
    ;;
  --help | -h) show_help ;;
  --install) prepare_python ;;
  --test) run_tests "${@:2}" ;;
  -*)
    if [[ $1 =~ ^($of_recipe)$ ]]; then
      run "$@"
    elif [[ $1 =~ ^($of_folder)$ ]]; then
      check_words "$@"
      call "harness.commands.${1#--}" "${@:2}"
    else
      IFS='|' read -ra known <<<"$of_recipe|$of_folder|--test|--install|--help"
      near=$(nearest 0.7 "$1" "${known[@]}")
      [[ -z $near ]] || fail "unknown option $1. Did you mean $near? ./launch.sh --help lists them"
      fail "unknown option $1: ./launch.sh --help lists them. Flags of a recipe come last: ./launch.sh RECIPE CONFIG $1 …"
    fi
    ;;
  *) run "$@" ;;
esac
