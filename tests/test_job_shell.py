"""A launch script as gkd check reads it, against what bash itself makes of it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pytest_gkd.job import shell, shell_patterns
from pytest_gkd.job.shell_values import Command

BASH = shutil.which("bash")
# bash tells what it would start: there is no PATH to find a program in.
TELLS = """
command_not_found_handle() {
    local told=("$@" ENVIRONMENT) name
    for name in $(compgen -e); do  # of which bash gives to no program what is an array
        [[ ${!name@a} == *a* ]] || told+=("$name=${!name}")
    done
    printf '%s\\0' "${told[@]}" END >&9
}
exec 9>&1 >/dev/null
"""
# What bash gives to every command by itself.
ALWAYS = {"HOME", "PATH", "LANG", "PWD", "OLDPWD", "SHLVL", "_"}

# Each ends in commands that bash cannot find, and so tells of.
SCRIPTS = {
    "defaults": 'run ${A:-1} "${B:-x y}" ${C:+c} "${D-}" ${E:=5} $E',
    "blanks between": 'A=x; B=y; run "$A $B" "a ${A:-1}  ${B} $(echo z)\t${A}" '
    '"$A\n$B" "$A $((1+2)) $B"',
    "quoted default": """A=${A:-"-m x"}; B=${B:-'c d'}"e f"; run $A "$B" $B""",
    "quotes": """run 'a b' "c $HOME d" $'e\\tf' g\\ h "i\\"j" 'k'"l"m""",
    "arrays": 'A=(a "b c" d); A+=(e); run "${A[@]}" ${A[1]} ${#A[@]} x"${A[0]}"y',
    "empty array": 'A=(); run "${A[@]}" end',
    "joined array": 'A=(a b); run "${A[*]}" "py ${A[*]} z"',
    "splitting": 'A="a b  c"; run $A "$A" $A/x',
    "arithmetic": "N=3; run $((N * 2 + 1)) $((N ** 2)) $((7 / 2)) $((N > 2 ? 4 : 5))",
    "negative division": "run $(((-7) / 2)) $(((-7) % 3))",
    "if": 'A=x; if [ "$A" = x ]; then B=1; elif [ "$A" = y ]; then B=2; '
    "else B=3; fi; run $B",
    "elif": 'A=y; if [[ $A == x* ]]; then B=1; elif [ "$A" = y ]; then B=2; '
    "else B=3; fi; run $B",
    "else": "N=1; if (( N > 2 )); then B=1; else B=3; fi; run $B",
    "and": '[ -z "" ] && A=1; [ -n "" ] || B=2; run $A $B',
    "case": "case q4b in q8b|q9b) T=8 ;; q4*) T=4 ;; *) T=1 ;; esac; run $T",
    "for": "for x in a b; do L+=(--$x 1); done; run ${L[@]}",
    "counting": "for ((i = 0; i < 3; i++)); do L+=(n$i); done; run ${L[@]}",
    "while": "i=0; while [ $i -lt 3 ]; do i=$((i + 1)); done; run $i",
    "arguments": "while [[ $# -gt 0 ]]; do case $1 in -n) N=$2; shift 2 ;; "
    '*) R+=("$1"); shift ;; esac; done; run "$N" "${R[@]}"',
    "function": "launch() { local m=$1; shift; run --m $m \"$@\"; }; launch a b 'c d'",
    "trimming": "P=a/b/c.tar.gz; run ${P##*/} ${P%/*} ${P%%.*} ${P#*/} ${P/b/x} "
    "${P//./_} ${P^^} ${P:2:1} ${#P}",
    "colon": "H=1.2.3.4 P=80; run http://$H:$P/x --a=$H:$P",
    "brackets": "N=2; run [0]*$N+[1]*3 data.files=\"['$N','b']\" 'x={a: 1}'",
    "tilde": "A=~/x; run ~/a k.v=~/b kv=~/c ~ $A a~/",
    "here-document": "cat > f <<EOF\na: $HOME\nEOF\nrun f",
    "read": "X=1; read -r -d '' A <<EOF\nb --c $X \\\n  --d 2\nEOF\nrun $A",
    "continued": "run a \\\n  b \\\n  # the end\nrun c",
    "background": "X=1 run a > log 2>&1 &\nwait",
    "pipe": "run a 2>&1 | other b",
    "subshell": "A=1; ( A=2; run $A ); run $A",
    "sourced": "source ./more.sh; run $FROM_MORE",
    "indirect": "A=B; B=c; run ${!A}",
    "either test": 'N=0; if [ -z "$N" ] || [ "$N" -le 0 ]; then N=8; fi; '
    'if [ "$N" = 8 ] && [[ $N -gt 9 ]]; then N=1; fi; run $N',
    "number by default": 'N=4; run ${A:-$((N - 1))} "${B:-$((N+1))}" ${N:-$((9))}',
    "unset": "A=1; unset A; run x${A}y",
    "multibyte": 'A="é"; run "$A" ü${A}ß "${A:-x}" --long-ü=1',
    "prefix": "time run a; command run b",
    "return": "f() { A=1; return; A=2; }; f; run $A",
    "break": "for x in a b c; do A=$x; if [ $x = b ]; then break; fi; done; run $A",
    "continue": "for x in a b c; do if [ $x = b ]; then continue; fi; L+=($x); done; "
    "run ${L[@]}",
    "local": "A=1; f() { local A=2 B=3; run $A; }; f; run $A",
    "export": 'export "A=2" B=3; run $A $B',
    "set": 'set a "b c" d; run "$1" "${@:2}" $#; set -e; run $1; set -- x; run $1',
    "slices": 'A=(a b c d); run "${A[@]:1}" "${A[@]:1:2}"',
    "first element": 'A=(a b); A=y; run "${A[@]}"; A+=z; run "${A[@]}"',
    "braces": 'run {a,b}c x{1..3} "{a,b}" k={1,2} {a} {} x{3..1}',
    "logic": "run $((2 && 3)) $((0 || 5)) $((1000000000000000001 / 1)) $((10 > 5))",
    "increments": "i=1; ((++i)); ((i++)); ((i += 2)); run $i; "
    "for ((j = 3; j > 0; --j)); do L+=($j); done; run ${L[@]}",
    "directory": 'cd sub; run "$PWD"; cd ..; run "$PWD"; pushd sub; run "$PWD"',
    "patterns": 'A=b; P=a/b/c; run ${P#*$A} ${P//$A/x} "${P%/c}" x${P/q/x}',
    "exit": "run a; exit 0; run b",
    "not": "if ! [ a = b ]; then A=1; fi; run $A",
    "glob": "case q5 in q[^4]) T=1 ;; *) T=2 ;; esac; run $T",
    "signs": "N=4; run $((N - 1)) $(((-1) + N)) $((-N))",
    "set in the background": "N=2; N=4 & wait; run $N",
    "before a function": "N=2; f() { run $N; }; N=4 f; run $N",
    "unset local": "X=5; f() { local X; run ${X:-7}; }; f; run $X",
    "shift too far": "set -- a b c; shift 5; run $#",
    "substitution": "Y=$(echo ${N:=5}); run x$Y ${N:-1}",
    "escaped names": "f() { FOO=1 return; run a; }; f; run b",
    "exported": "A=1; export B=2; X=3 run a; run b; export A; A=5; run c",
    "export by others": "declare -x A=1; typeset -x B; B=2; run a; declare +x A; run b",
    "no longer exported": "export A=1 B=2; export -n B; run a; unset A; A=3; run b",
    "all exported": "set -a; A=1; source ./more.sh; set +a; B=2; run $B; "
    "set -o allexport; C=3; run c",
    "exported by a function": "f() { export A=1; local -x L=5; run a; }; f; run b",
    "exported in a subshell": "( export A=1; run a ); run b",
    "exported to a function": "f() { run a; }; X=4 f; run b; X=5; X=6 f; run c",
    "no array is exported": "export A=(a b); B=(c); export B; run a",
    "no function is exported": "f() { run a; }; f2=1; export -f f; f",
    "unquoted array": 'A=("a b" c); run ${A[@]} ${A[*]} "$@"',
}


def told(script: Path, *arguments: str) -> list[list[str]]:
    """The commands that bash would have started, each with its environment."""
    assert BASH is not None
    done = subprocess.run(
        [BASH, "-c", f'{TELLS}\n. "$0"', str(script), *arguments],
        cwd=script.parent,
        env={"HOME": "/home/her", "PATH": "/nowhere", "LANG": "C.UTF-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=60,
    )
    found: list[list[str]] = [[]]
    for word in done.stdout.decode().split("\0")[:-1]:
        if word == "END":
            at = found[-1].index("ENVIRONMENT")
            seen = [v for v in found[-1][at + 1 :] if v.partition("=")[0] not in ALWAYS]
            found[-1][at:] = [" ".join(sorted(seen))]
            found.append([])
        else:
            found[-1].append(word)
    return [words for words in found if words and words[0] != "cat"]


def words(command: Command) -> list[str | None]:
    return [word.text.value for word in command.words]


def environment(command: Command) -> str:
    given = command.environment.items()
    seen = (f"{name}={word.text.value}" for name, word in given if name not in ALWAYS)
    return " ".join(sorted(seen))


def commands(
    script: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> list[list[list[str | None]]]:
    """The same as gkd check reads it, on each way through the script."""
    monkeypatch.chdir(script.parent)
    read = shell.read(script, {"HOME": "/home/her"}, arguments)
    return [
        [
            [*words(command), environment(command)]
            for command in world.commands
            if words(command)[0] != "cat"
        ]
        for world in read.worlds
    ]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "more.sh").write_text("FROM_MORE=7\nreturn\nFROM_MORE=8\n")
    (tmp_path / "sub").mkdir()
    return tmp_path / "run.sh"


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_read_as_bash_reads_it(
    name: str, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text(SCRIPTS[name] + "\n")
    arguments = ["-n", "4", "a b"] if name == "arguments" else []
    expected = told(script, *arguments)
    assert expected, "bash itself would start nothing"
    (found,) = commands(script, monkeypatch, *arguments)
    assert sorted(map(str, found)) == sorted(map(str, expected))


OWN_DIRECTORY = [
    '$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)',
    '$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd )',
    '$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/..',
    '$(dirname "$0")',
]


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("idiom", OWN_DIRECTORY)
def test_the_directory_of_a_script_is_known(
    idiom: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    script = tmp_path / "jobs/run.sh"
    script.write_text(f'D="{idiom}"\n/bin/echo "$D"\n')
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert BASH is not None
    printed = subprocess.check_output([BASH, str(script)], text=True).strip()
    (world,) = shell.read(script, {}).worlds
    assert words(world.commands[0]) == ["/bin/echo", printed]


CANARY = """
touch {0}/a
X=$(touch {0}/b; echo 1) Y=`touch {0}/c`
eval "touch {0}/d"
echo x > {0}/e
cat <<EOF > {0}/f
EOF
trap 'touch {0}/g' EXIT
[ -f $(touch {0}/h) ]
A[$(touch {0}/i)]=1
echo $((1 + $(touch {0}/j)))
run ${{B:-$(touch {0}/k)}} <(touch {0}/l)
rm -rf {0}/kept
"""


def test_nothing_of_a_script_is_executed(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "canaries"
    (place / "kept").mkdir(parents=True)
    script.write_text(CANARY.format(place))
    commands(script, monkeypatch)
    assert [path.name for path in place.iterdir()] == ["kept"]
    told(script)  # but bash, asked the same, does write
    assert (place / "e").exists()


def test_what_hangs_on_the_unknown_is_followed_both_ways(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text('N=$(nproc)\nif [ "$N" -gt 8 ]; then T=8; else T=1; fi\nrun $T\n')
    assert sorted(map(str, commands(script, monkeypatch))) == [
        "[['run', '1', '']]",
        "[['run', '8', '']]",
    ]
    world = shell.read(script, {}).worlds[0]
    (condition,) = world.conditions
    assert str(condition) == 'if [ "$N" -gt 8 ] (line 2)'
    assert condition.needs == {"$(nproc)", "N"}


def test_a_way_that_ends_in_exit_is_not_the_runs(script: Path) -> None:
    script.write_text('[ -d "$DATA" ] || { echo "no data"; exit 1; }\nrun $DATA\n')
    going = [w for w in shell.read(script, {}).worlds if not w.jump]
    assert [words(c) for w in going for c in w.commands] == [["run", None]]


def test_a_variable_from_outside_is_named(script: Path) -> None:
    script.write_text("run --model=$MODEL\n")
    (world,) = shell.read(script, {}).worlds
    word = world.commands[0].words[1]
    assert (word.text.value, set(word.text.needs)) == (None, {"MODEL"})
    assert word.line == 1
    (world,) = shell.read(script, {"MODEL": "m"}).worlds
    assert world.commands[0].words[1].text.value == "--model=m"


@pytest.mark.skipif(shutil.which("env") is None, reason="needs env")
@pytest.mark.parametrize(
    "line",
    [
        "env X=1 Y='a b' {}",
        "export A=1; env -i X=1 {}",
        "export A=1 B=2; nohup env -u A X=$B {}",
    ],
)
def test_what_env_gives_to_a_command_is_what_it_sees(line: str, script: Path) -> None:
    shows = "/usr/bin/env"
    script.write_text(line.format(shows) + "\n")
    (world,) = shell.read(script, {}).worlds
    assert BASH is not None
    done = subprocess.run(
        [BASH, str(script)], env={}, stdout=subprocess.PIPE, text=True, check=True
    )
    seen = [v for v in done.stdout.splitlines() if v.partition("=")[0] not in ALWAYS]
    assert environment(world.commands[0]) == " ".join(sorted(seen))


def test_a_variable_before_a_command_has_its_own_line(script: Path) -> None:
    script.write_text("export A=$MORE\nX=1 \\\nY=2 \\\nrun\n")
    (world,) = shell.read(script, {}).worlds
    given = world.commands[0].environment
    lines = {name: (word.line, word.source) for name, word in given.items()}
    assert lines == {"A": (1, "$MORE"), "X": (2, "1"), "Y": (3, "2")}
    assert given["A"].text.needs == {"MORE"}


def test_what_stands_before_an_ampersand_is_not_waited_for(script: Path) -> None:
    lines = ["a", "b > log 2>&1 &", "if true; then c & d; fi", "f() { g; }", "f &", "e"]
    script.write_text("\n".join(lines) + "\n")
    (world,) = shell.read(script, {}).worlds
    waits = {words(command)[0] for command in world.commands if command.waits}
    assert waits == {"a", "d", "e"}


def test_a_word_of_an_array_has_its_own_line(script: Path) -> None:
    script.write_text('A=(\n  a=1\n  b=2\n)\nrun "${A[@]}"\n')
    (world,) = shell.read(script, {}).worlds
    assert [(w.line, w.source) for w in world.commands[0].words[1:]] == [
        (2, "a=1"),
        (3, "b=2"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "dirname a/b",
        "dirname /",
        "dirname a",
        "dirname a//b/",
        "dirname /a",
        "basename /a/b.sh",
        "basename /a/b.sh .sh",
        "basename /",
        "basename .sh .sh",
        "seq 3",
        "seq 2 4",
        "seq 2 3 9",
        "realpath /usr/../etc/.",
        "expr 32 / 4 / 2",
        "expr 7 % 4 * 5",
        "expr 3 - 4 + 9",
        "echo a b",
    ],
)
def test_what_a_program_prints_is_what_it_would_print(line: str) -> None:
    words = line.split()
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    assert shell_patterns.printed(words, lambda path: path) == done.stdout.rstrip("\n")


@pytest.mark.parametrize(
    "line",
    [
        "readlink a",
        "realpath --relative-to=/a /a/b",
        "date",
        "seq x",
        "echo -n a",
        "expr 1 / 0",
        "expr 1 + 2 * 3",
    ],
)
def test_what_is_not_certain_to_be_printed_is_not_guessed(line: str) -> None:
    assert shell_patterns.printed(line.split(), lambda path: path) is None


@pytest.mark.parametrize(
    "text",
    [
        "while true; do x=a$x$x; done; run $x\n",
        "f() { f; f; }; f; run\n",
        "x=((((( && || ;; run\n",
        "source ./run.sh; run a\n",
        "\n".join(f'[ "$A{n}" = x ] && B{n}=1' for n in range(40)) + "\nrun $B7\n",
        f"run $(( {'9**' * 30}9 ))\n",
        f"run ${{A:-{'${A:-' * 300}x{'}' * 300}}}\n",
        "A=" + "a" * 30_000 + "; run ${A%%*b*b*b*}\n",
        "for i in " + "1 " * 5000 + "; do x+=$i; done; run $x\n",
    ],
    ids=[
        "doubling",
        "recursion",
        "errors",
        "itself",
        "branches",
        "powers",
        "nested",
        "pattern",
        "rounds",
    ],
)
def test_a_hostile_script_ends(text: str, script: Path) -> None:
    script.write_text(text)
    found = shell.read(script, {}).worlds
    assert 0 < len(found) <= 2 * shell.MOST_WORLDS
