#!/bin/sh
# Prints the exact versions that an environment holds, in the form of a constraints file.
python="$1"
echo "# Exact versions for reproducible installs; made by \`make lock\`. Ranges for library users are in pyproject.toml."
"$python" -m pip --disable-pip-version-check freeze --exclude-editable --exclude pip --exclude setuptools --exclude wheel |
    sed -E 's/\+[a-z0-9.]+$//' | sed -E 's/^onnxruntime-gpu==(.*)$/onnxruntime-gpu==\1\nonnxruntime==\1/'
