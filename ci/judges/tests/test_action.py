"""Tests of packaging/github-action/count, which the GitHub Action runs, with a program in place of hindsight."""

import os
import pathlib
import subprocess
import tempfile
import unittest

FOLDER = pathlib.Path(__file__).resolve().parents[3] / "packaging/github-action"

# Prints its arguments, each in a line, and the verdict.
PROGRAM = """#!/bin/sh
printf '%s\\n' "$@" >arguments
echo 'FAIL: <b>instructions' >&2
exit 1
"""


class Count(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "hindsight").write_text(PROGRAM, encoding="utf-8")
        (self.folder / "hindsight").chmod(0o755)

    def count(self, **inputs):
        """Runs the script; returns its status, standard error, the arguments and the summary."""
        defaults = {"CMDLINE": "", "OPTIONS": "", "BASELINE": "", "MAX_INCREASE": "0.5%"}
        ended = subprocess.run(
            ["sh", FOLDER / "count"],
            cwd=self.folder,
            env={
                "PATH": f"{self.folder}:{os.environ['PATH']}",
                "GITHUB_STEP_SUMMARY": str(self.folder / "summary"),
                "IMAGE": "kernel.elf",
                "OUTPUT": "now.json",
                **defaults,
                **inputs,
            },
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        files = [self.folder / name for name in ("arguments", "summary")]
        texts = [f.read_text(encoding="utf-8") if f.exists() else "" for f in files]
        return ended.returncode, ended.stderr, texts[0].splitlines(), texts[1]

    def test_inputs_become_arguments(self):
        _, _, arguments, _ = self.count(
            OPTIONS="--caches  --cpus 2 *", CMDLINE="a 'b'", IMAGE="--odd image"
        )
        self.assertEqual(
            arguments,
            "stat --caches --cpus 2 * --output now.json --cmdline".split()
            + "a 'b'|--|--odd image".split("|"),
        )

    def test_failure_is_the_verdict_of_the_step_and_in_its_summary(self):
        (self.folder / "base.json").write_text("{}", encoding="utf-8")
        status, stderr, arguments, summary = self.count(BASELINE="base.json", MAX_INCREASE="100")
        self.assertEqual(status, 1)
        self.assertIn("FAIL", stderr)
        self.assertEqual(arguments[3:7], ["--baseline", "base.json", "--max-increase", "100"])
        self.assertIn("\n    FAIL: <b>instructions\n", summary)

    def test_missing_baseline_says_how_to_make_one(self):
        status, stderr, arguments, _ = self.count(BASELINE="base.json")
        self.assertEqual((status, arguments), (2, []))
        self.assertIn("::error::base.json does not exist: commit the counts", stderr)

    def test_inputs_of_the_action_have_the_names_of_the_script(self):
        action = (FOLDER / "action.yml").read_text(encoding="utf-8")
        for name in ["IMAGE", "CMDLINE", "OPTIONS", "BASELINE", "MAX_INCREASE", "OUTPUT"]:
            given = name.lower().replace("_", "-")
            self.assertIn(f"        {name}: ${{{{ inputs.{given} }}}}\n", action)
            self.assertIn(f"  {given}:\n", action)


if __name__ == "__main__":
    unittest.main()
