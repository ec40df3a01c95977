"""A user's own small distillation, whose messages are in German or Chinese."""

import argparse
import json
import os
import signal
import time
import traceback

import steps
import torch

TEXTE = {
    "de": {
        "lesen": "Lese Daten aus {pfad} ...",
        "kaputt": "FEHLER in Zeile {zeile}: {fehler} -- Zeile wird übersprungen",
        "daten": "{gut} Zeilen gelesen, {schlecht} fehlerhafte verworfen",
        "modelle": "Baue Schüler und Lehrer auf",
        "los": "Training beginnt ({schritte} Schritte)",
        "lehrer": "Lehrer hat nicht geantwortet (Versuch {versuch}): {fehler}",
        "aussetzen": "Schritt {schritt}: Verlust ist {verlust}, Schritt wird ausgesetzt",
        "schritt": "Schritt {schritt:3d}/{schritte} Verlust {verlust:.4f} Gradient {norm:.3f} Dauer {dauer:.2f} s",
        "sichern": "Sichere Stand nach Schritt {schritt}",
        "gesichert": "Stand gesichert",
        "prüfen": "Prüfe das Modell auf {n} Aufgaben",
        "geprüft": "Prüfung: {richtig} richtig, {falsch} falsch, {abbruch} abgebrochen",
        "signal": "Signal {nummer} erhalten, beende nach diesem Schritt",
        "geduld": "Keine Verbesserung seit {n} Schritten, höre auf",
        "export": "Schreibe das fertige Modell",
        "export_fehler": "Hochladen fehlgeschlagen: {fehler} -- egal, liegt lokal",
        "räumen": "Räume auf",
        "ende": "Fertig. {wiederholt} Wiederholungen, {ausgesetzt} ausgesetzte Schritte, 0 Abbrüche.",
    },
    "zh": {
        "lesen": "正在读取数据 {pfad} ...",
        "kaputt": "第 {zeile} 行错误: {fehler}，已跳过",
        "daten": "读取 {gut} 行，丢弃 {schlecht} 条损坏数据",
        "modelle": "构建学生模型和教师模型",
        "los": "开始训练（共 {schritte} 步）",
        "lehrer": "教师模型请求失败（第 {versuch} 次尝试）: {fehler}",
        "aussetzen": "第 {schritt} 步: 损失为 {verlust}，跳过该步",
        "schritt": "步数 {schritt:3d}/{schritte} 损失 {verlust:.4f} 梯度范数 {norm:.3f} 耗时 {dauer:.2f} 秒",
        "sichern": "正在保存第 {schritt} 步的检查点",
        "gesichert": "检查点保存完成",
        "prüfen": "开始评测，共 {n} 题",
        "geprüft": "评测结果: 正确 {richtig}，错误 {falsch}，超时 {abbruch}",
        "signal": "收到信号 {nummer}，本步结束后退出",
        "geduld": "连续 {n} 步没有改善，提前停止",
        "export": "导出最终模型",
        "export_fehler": "上传失败: {fehler}，忽略，模型保留在本地",
        "räumen": "清理资源",
        "ende": "训练结束。重试 {wiederholt} 次，跳过 {ausgesetzt} 步，失败 0 次。",
    },
}
parser = argparse.ArgumentParser()
parser.add_argument("--sprache", choices=TEXTE, default="de")
parser.add_argument("--schritte", type=int, default=10)
parser.add_argument("--daten", default="prompts.jsonl")
parser.add_argument("--sichern-alle", type=int, default=5)
parser.add_argument("--aufgaben", type=int, default=20)
parser.add_argument("--geduld", type=int, default=0)
parser.add_argument("--hochladen", action="store_true")
parser.add_argument("--tempo", type=float, default=0.2)
args = parser.parse_args()
halt = []


def sage(was, **mehr):
    print(time.strftime("[%H:%M:%S]"), TEXTE[args.sprache][was].format(schritte=args.schritte, **mehr), flush=True)


def lies():
    sage("lesen", pfad=args.daten)
    gut, schlecht = [], 0
    for zeile, text in enumerate(open(args.daten, encoding="utf-8", errors="replace"), 1):
        try:
            gut.append(json.loads(text)["prompt"][-1]["content"])
        except Exception as fehler:
            schlecht += 1
            sage("kaputt", zeile=zeile, fehler=repr(fehler))
    sage("daten", gut=len(gut), schlecht=schlecht)
    return gut


def frage_lehrer(lehrer, ids, stand):
    for versuch in range(1, 6):
        try:
            return steps.compute_log_prob(lehrer, ids)
        except Exception as fehler:
            stand["wiederholt"] += 1
            sage("lehrer", versuch=versuch, fehler=fehler)
            traceback.print_exc()
            time.sleep(0.4)
    raise SystemExit(1)


def pruefe(schueler, zeilen):
    sage("prüfen", n=args.aufgaben)
    richtig = 0
    for aufgabe in range(args.aufgaben):
        ids = steps.generate_sequences(schueler, steps.next_batch(zeilen, aufgabe, 1))
        richtig += steps.compute_reward(ids).item() > 0.6
    sage("geprüft", richtig=richtig, falsch=args.aufgaben - richtig, abbruch=0)


def main():
    signal.signal(signal.SIGTERM, lambda nummer, rahmen: (halt.append(nummer), sage("signal", nummer=nummer)))
    zeilen = lies()
    sage("modelle")
    modell, optimierer = steps.build_actor(32, 1e-3)
    schueler, lehrer = steps.build_rollout(32), steps.build_teacher(32)
    stand = {"wiederholt": 0, "ausgesetzt": 0}
    bester, seit = 1e9, 0
    sage("los")
    for schritt in range(1, args.schritte + 1):
        beginn = time.time()
        steps.update_weights(modell, schueler)
        ids = steps.generate_sequences(schueler, steps.next_batch(zeilen, schritt))
        ziel = frage_lehrer(lehrer, ids, stand)
        verlust = steps.distill_loss(modell(ids).log_softmax(-1), ziel)
        if not torch.isfinite(verlust):
            stand["ausgesetzt"] += 1
            sage("aussetzen", schritt=schritt, verlust=verlust.item())
            continue
        verlust.backward()
        norm = torch.nn.utils.clip_grad_norm_(modell.parameters(), 1.0)
        optimierer.step()
        optimierer.zero_grad()
        time.sleep(args.tempo)
        sage("schritt", schritt=schritt, verlust=verlust.item(), norm=norm.item(), dauer=time.time() - beginn)
        if schritt % args.sichern_alle == 0:
            sage("sichern", schritt=schritt)
            steps.save_checkpoint(modell, optimierer, schritt, f"out/eigen/{schritt}")
            sage("gesichert")
        seit = 0 if verlust.item() < bester else seit + 1
        bester = min(bester, verlust.item())
        if args.geduld and seit >= args.geduld:
            sage("geduld", n=seit)
            break
        if halt:
            break
    pruefe(schueler, zeilen)
    sage("export")
    steps.save_checkpoint(modell, optimierer, schritt, "out/eigen/fertig")
    if args.hochladen:
        try:
            steps.ask_server("http://127.0.0.1:9/upload", ids)
        except OSError as fehler:
            sage("export_fehler", fehler=fehler)
    sage("räumen")
    for ordner in os.listdir("out/eigen"):
        if ordner != "fertig":
            for name in os.listdir(f"out/eigen/{ordner}"):
                os.remove(f"out/eigen/{ordner}/{name}")
    sage("ende", **stand)


if __name__ == "__main__":
    main()
