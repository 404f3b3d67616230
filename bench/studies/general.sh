#!/bin/sh
# The two students of general.toml: general.sh ENCODER WIKITEXT OUT
set -e
fastkd distill --task masked-lm --teacher "$1" --finetune-teacher 2 --teacher-learning-rate 3e-4 \
  --student-layers 3 --method lrc_bert --set gamma=0 \
  --train "$2/valid.txt" --eval "$2/test.txt" --max-eval-rows 400 --max-length 64 \
  --epochs 4 --learning-rate 3e-4 --precision bf16 --out "$3/distilled"
python - "$1" "$3/cut" <<'END'
import sys

from transformers import AutoModelForMaskedLM, AutoTokenizer, set_seed

from fastkd.distill import student_from_teacher

encoder, out = sys.argv[1:]
set_seed(0)
student_from_teacher(AutoModelForMaskedLM.from_pretrained(encoder), [2, 4, 6]).save_pretrained(out)
AutoTokenizer.from_pretrained(encoder).save_pretrained(out)
END
