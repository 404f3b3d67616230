#!/bin/sh
# The two students of general.toml: general.sh ENCODER WIKITEXT OUT
set -e
fastkd distill --task masked-lm --teacher "$1" --finetune-teacher 2 --teacher-learning-rate 3e-4 \
  --student-layers 3 --method lrc_bert --set beta=0 --set gamma=0 --epochs 2 --learning-rate 3e-4 \
  --train "$2/valid.txt" --eval "$2/test.txt" --max-eval-rows 400 --max-length 64 \
  --precision bf16 --out "$3/distilled"
python - "$3/distilled/teacher" "$3/cut" <<'END'
import sys

from transformers import AutoModelForMaskedLM, AutoTokenizer

from fastkd.distill import student_from_teacher

teacher, out = sys.argv[1:]
student_from_teacher(AutoModelForMaskedLM.from_pretrained(teacher), [2, 4, 6]).save_pretrained(out)
AutoTokenizer.from_pretrained(teacher).save_pretrained(out)
END
