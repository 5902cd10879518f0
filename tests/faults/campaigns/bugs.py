"""The mistakes that crash tests have to see, whichever method plants them: (module of this folder, its name there)."""

from __future__ import annotations

from collections.abc import Mapping

from tests.faults.campaigns.report import Report

TO_BE_SEEN: Mapping[str, tuple[str, str]] = {
    "acknowledged before the commit": ("kills", "told before the commit"),
    "dependents woken before the commit": ("kills", "dependents woken before the commit"),
    "start not committed before the call": ("kills", "called before its start is stored"),
    "an attempt overwritten by the next": ("kills", "an attempt's number used twice"),
    "a batch that is not one transaction": ("kills", "a batch committed in pieces"),
    "tasks added apart from their planner's completion": ("kills", "added tasks stored after their planner's end"),
    "a policy's decision apart from what it adds": ("kills", "a decision stored after what it added"),
    "a policy asked again at resume": ("kills", "a policy asked again about all"),
    "for_each expanded twice": ("kills", "a list expanded again by resume"),
    "done tasks queued again by resume": ("kills", "completed tasks queued again"),
    "crashes not counted": ("kills", "crashes not counted"),
    "parallel calls that each see the same money": ("money", "checked, then added"),
    "money spent before a crash forgotten": ("money", "settlements lost at resume"),
    "money reserved for ever": ("money", "a reservation never released"),
    "calls of a killed process taken for free": ("money", "a reservation not stored with its start"),
    "a limit's time forgotten by a resume": ("parking", "a resume forgets the time"),
    "all sent at once when a limit's time has come": ("parking", "no probe after a resume"),
    "a parked run that nothing wakes": ("parking", "a parked run is never due"),
    "a run that parks left after a crash": ("parking", "runs of dead processes are left"),
    "a notice taken for sent before it is": ("notice_kills", "noted as sent before it is sent"),
    "a notice that a receiver cannot recognise": ("notice_kills", "another id each time"),
    "a notice of what did not happen": ("notice_kills", "told before it is stored"),
    "processes on one account that do not know of each other": ("accounts", "each process keeps the limit alone"),
    "an allowance that nobody uses": ("accounts", "a grant is used half a second late"),
    "a process that never gets its turn": ("accounts", "a process that waits has no place in the line"),
    "a person asked about kills from outside": ("frequent", "asked after three deaths"),
    "a crasher that leaves no time to others": ("frequent", "no delay"),
    "a crasher that nobody is asked about": ("frequent", "deaths not counted"),
    "a commit error taken for not stored": ("kills", "a lost answer taken for no commit"),
    "a living owner not looked at": ("kills", "claimed beside a living owner"),
    "a missing database created by resume": ("kills", "a missing store made to resume"),
    "checksums not looked at": ("kills", "checksums not looked at"),
    "no epoch check": ("two", "no epoch check"),
    "epoch check outside the transaction": ("two", "epoch checked outside the transaction"),
    "lease on wall time": ("two", "lease by the wall clock"),
    "synchronous = OFF": ("power", "synchronous = OFF"),
    "synchronous = NORMAL": ("power", "synchronous = NORMAL"),
    "shield removed": ("cancels", "the writer's shield removed"),
    "writer inside a scope": ("schedules", "written within the caller's scope"),
    "a transaction that a cancellation can cut": ("cancels", "a transaction in three calls"),
    "requeue forgotten": ("schedules", "requeue forgotten after a retry's delay"),
    "a failed sync taken for a commit": ("slow", "acknowledged although the sync failed"),
    "continuing after SQLITE_FULL": ("slow", "going on after SQLITE_FULL"),
    "missing fsync before rename": ("files", "renamed before it is synced"),
    "missing fsync of the folder": ("files", "a name that is not synced"),
    "children that outlive a SIGKILL": ("children", "children that do not watch their parent"),
    "children not in a session": ("children", "children not in a session"),
    "an agent at work given up": ("adoptions", "started over what it should adopt"),
    "what is left at work of a cut turn": ("adoptions", "leftovers not ended"),
    "an agent of a host begun beside itself": ("hosts", "placed attempts begun anew"),
    "an agent of a host ended by a new connection": ("hosts", "no attempt kept"),
    "a broken connection taken for the end of a host's agents": ("hosts", "a broken connection taken for the end"),
    "a former owner of a host's agents": ("hosts", "a former owner's host process left alive"),
    "attempts of a lost host kept": ("partitions", "lost attempts kept"),
    "a dead worker taken for the end of its agents": ("cluster", "worker killed"),
    "agents of a cluster begun beside themselves": ("cluster", "all killed"),
    "acknowledged before a server's answer": ("server_kills", "acknowledged before the server's answer"),
    "no fence in a batch of one statement": ("server_kills", "no fence in the one statement"),
    "a lease kept after the end": ("server_kills", "a lease not released"),
    "changes of a failed write forgotten": ("servers", "a failed write forgotten"),
    "a promoted standby believed": ("servers", "nothing kept for a store that is behind"),
    "a run ended although its server is away": ("servers", "no patience at the end"),
    "done tasks queued again by a fleet": ("fleet", "completed tasks queued again"),
    "a dead worker's runs left to themselves": ("fleet", "taken over late"),
    "an answer taken over for another prompt": ("edits", "the prompt as rendered left out of the key"),
    "an effect taken over": ("edits", "effects taken over"),
    "INSERT OR REPLACE for results": ("machine", "a stored result replaced"),
}


def unseen(reports: Mapping[str, Report]) -> list[str]:
    """The mistakes that `reports`, by module, do not show to be seen; those of a method without cases are left out."""
    return [
        mistake
        for mistake, (module, name) in TO_BE_SEEN.items()
        if module in reports and reports[module].cases and not reports[module].planted.get(name, False)
    ]
